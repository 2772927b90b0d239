"""Megatron's optimizers, and their rule for param groups.

No file records the parameters in a group. They follow from Megatron's rule: tensors with one dim and biases are not
decayed, and experts sharded over ranks are separate. Muon and Lion only step matrices. The embedding, the output layer
and tensors with one dim go to another optimizer, named in its groups.

    --optimizer adam                                        one optimizer, and one for separate experts
    --optimizer muon                                        the same for muon and for adam, not distributed
    --optimizer muon, layer-wise (`--use-distributed-optimizer`)
        with `use_layer_wise_param_layout`                  muon's, with experts, and a distributed adam
        without it                                          muon's and adam's, with experts, not distributed

Format facts: megatron-core 0.16.1 and 0.19.2, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`,
`_get_megatron_emerging_optimizer`), optimizer.py (`param_group_identifier_keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, WEIGHT, Key, ParamGroup
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Shape, Tensor
from converters.megatron.chunks import MegatronModel
from converters.names.megatron.model.spelling import is_expert, split_layer
from converters.optimizers.states import OptimizerStates

#: From optimizer.py, `param_group_identifier_keys`.
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
#: Further identifying options since 0.18.
_OVERRIDES = ("optimizer", "max_lr", "min_lr", "start_wd", "end_wd")
#: States supported by the distributed optimizer.
ADAM = ("exp_avg", "exp_avg_sq")
_EMBEDDINGS = ("embedding.word_embeddings.", "output_layer.")

#: `--optimizer` for all parameters, and only for matrices.
ADAM_NAME = "adam"
KINDS = (ADAM_NAME, "sgd")
OF_MATRICES = ("muon", "lion")


def _kind(args: Mapping[str, Any]) -> str:
    kind = args.get("optimizer")
    return kind.lower() if isinstance(kind, str) else KINDS[0]


def is_of_matrices(args: Mapping[str, Any]) -> bool:
    return _kind(args) in OF_MATRICES


def is_known(args: Mapping[str, Any]) -> bool:
    return _kind(args) in (*KINDS, *OF_MATRICES)


def is_partly_distributed(args: Mapping[str, Any]) -> bool:
    """Return True if only matrices use a layer-wise optimizer."""
    layer_wise = args.get("use_layer_wise_distributed_optimizer") and args.get("use_layer_wise_param_layout")
    return is_of_matrices(args) and bool(layer_wise)


def check_kind(args: Mapping[str, Any], path: str | Path, kinds: Sequence[str] = KINDS) -> None:
    if (kind := _kind(args)) not in kinds:
        raise NotFoundError(
            f"reading states from Megatron's optimizer {kind!r} in this layout is not supported",
            path=path,
            expected=f"--optimizer {' or '.join(kinds)}",
            found=f"--optimizer {kind}",
            hint="Megatron-LM itself loads it; to read the weights here, save them with --no-save-optim",
        )


def stepped_by(name: str, ndim: int, args: Mapping[str, Any]) -> str | None:
    """Name the optimizer that steps a parameter; None is the run's own."""
    if not is_of_matrices(args) or (ndim == 2 and not name.startswith(_EMBEDDINGS)):
        return None
    return str(args.get("muon_scalar_optimizer") or "adam") if _kind(args) == "muon" else "adam"


def is_decayed(name: str, ndim: int, args: Mapping[str, Any]) -> bool:
    """Follow `get_standard_config_overrides`."""
    if args.get("apply_wd_to_qk_layernorm") and ("q_layernorm." in name or "k_layernorm." in name) and ndim == 1:
        return True
    return not (name.endswith(".bias") or ndim == 1)


def is_decoupled(name: str, args: Mapping[str, Any]) -> bool:
    """Return True if a parameter uses `--decoupled-lr`."""
    return args.get("decoupled_lr") is not None and name.startswith(_EMBEDDINGS)


def belongs(name: str, ndim: int, group: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    """Match a parameter, under its module's own name, with a param group."""
    multiplier = group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    if (multiplier != 0.0) != is_decayed(name, ndim, args):
        return False
    if is_of_matrices(args) and group.get("optimizer") != stepped_by(name, ndim, args):
        return False
    decoupled = bool(group.get("is_decoupled_lr")) or (
        args.get("decoupled_lr") is not None and group.get("max_lr") == args["decoupled_lr"]
    )
    return decoupled == is_decoupled(name, args)


def plain(value: Any) -> Any:
    is_number = isinstance(value, StoredTensor) and value.extent.numel == 1
    return read_scalar(value.extent) if is_number else value


@dataclass
class Optimizers:
    states: OptimizerStates = field(default_factory=OptimizerStates)
    groups: dict[Any, tuple[dict[str, None], Mapping[str, Any]]] = field(default_factory=dict)
    grad_scaler: Any = None

    def note_group(
        self, group: Mapping[str, Any], fqns: Sequence[str], file: str, step: Any = None, *, by_all: bool = False
    ) -> None:
        """Record a param group's options and `step`.

        Groups are identified by Megatron's rule, or with `by_all` by every option.
        """
        options = {name: value for name, value in group.items() if name != "params"}
        names = sorted(options) if by_all else (*IDENTITY, *_OVERRIDES)
        key = tuple((name, str(options.get(name, options.get(f"pre_{name}")))) for name in names)
        members, _ = self.groups.setdefault(key, ({}, options))
        members |= dict.fromkeys(fqns)
        step = plain(options.get("step", step))
        if type(step) in (int, float):
            self.states.agree(fqns, "step", step, path=file)

    def param_groups(self, order: Iterable[str]) -> tuple[ParamGroup, ...]:
        place = {fqn: number for number, fqn in enumerate(order)}
        return tuple(
            ParamGroup(tuple(sorted(fqns, key=place.__getitem__)), options) for fqns, options in self.groups.values()
        )


def check_alike(
    held: Mapping[Key, tuple[Shape, DType]], found: Optimizers, args: Mapping[str, Any], path: str | Path
) -> None:
    """Raise CorruptError if a parameter lacks a state or master that others with its optimizer have.

    Masters are compared between weights with one dtype. A parameter without param group and states was frozen. Adam has
    both of its moments or, before its first step, none.
    """
    if not is_known(args):
        return
    states: dict[str, list[str]] = {fqn: [] for members, _ in found.groups.values() for fqn in members}
    roles, shapes = dict.fromkeys(ADAM), dict[str, Shape]()
    for (fqn, role), (shape, _) in held.items():
        if role != BUFFER:
            shapes[fqn] = shape
        if role not in (WEIGHT, BUFFER):
            states.setdefault(fqn, []).append(role)
            roles[role] = None
    steps = found.states.scalars.get("step", {})
    first: dict[_Stepped, str] = {}  # few parameters differ in these facts
    for fqn, own in states.items():
        weight, optimizer = held.get((fqn, WEIGHT)), stepped_by(fqn, len(shapes[fqn]), args)
        begun = bool(steps.get(fqn)) or not set(ADAM).isdisjoint(own)
        first.setdefault(_Stepped(optimizer, weight and weight[1], begun, tuple(own)), fqn)
    expected = {one.kind(role) for one in first for role in one.states}
    adams = [one for one in first if one.begun and (one.optimizer or args.get("optimizer")) == ADAM_NAME]
    expected |= {one.kind(role) for one in adams for role in ADAM}
    for one, fqn in first.items():
        lacking = [role for role in roles if one.kind(role) in expected and role not in one.states]
        if lacking:
            raise CorruptError(
                "a parameter lacks a state, but others with the same optimizer have it",
                path=path,
                fqn=fqn,
                expected=", ".join(lacking),
                found=", ".join(role for role in roles if role in one.states) or "none",
            )


class _Stepped(NamedTuple):
    """Facts about a parameter: its optimizer, its weight's dtype, its states, and True if Adam has stepped it."""

    optimizer: str | None
    dtype: DType | None
    begun: bool
    states: tuple[str, ...]

    def kind(self, role: str) -> tuple[object, ...]:
        return role, self.optimizer, self.dtype if role == MASTER else None


def without_states(keys: Iterable[Key]) -> tuple[str, ...]:
    """Note parameters without states: no file records frozen parameters."""
    known: dict[str, set[str]] = {}
    for fqn, role in keys:
        if role != BUFFER:
            known.setdefault(fqn, set()).add(role)
    bare = [fqn for fqn, roles in known.items() if roles <= set(MODEL_ROLES)]
    if not bare or len(bare) == len(known):
        return ()
    named = bare[0] if len(bare) == 1 else f"{bare[0]}, ..."
    said = (
        "parameter was frozen, or its states were" if len(bare) == 1 else "parameters were frozen, or their states were"
    )
    return (f"{len(bare)} {said} lost (Megatron's files don't record the reason): {named}",)


# -- writing -------------------------------------------------------------------------------------------------

#: (separate experts, decayed, own learning rate, `Group.optimizer`)
Kind = tuple[bool, bool, bool, str | None]


@dataclass(frozen=True, slots=True)
class Group:
    """Param group. `optimizer` None is the run's own."""

    options: Mapping[str, Any]
    expert: bool
    decayed: bool
    decoupled: bool
    optimizer: str | None

    @property
    def kind(self) -> Kind:
        return self.expert, self.decayed, self.decoupled, self.optimizer


class MegatronOptimizer:
    """Source's optimizer in Megatron's form.

    Raise LossError if the distributed optimizer can't hold the states, or the run's optimizer is not in `kinds`.
    """

    kinds: Sequence[str] = (*KINDS, *OF_MATRICES)

    def __init__(self, model: MegatronModel) -> None:
        self.model = model
        self.args = model.args
        if (kind := _kind(self.args)) not in self.kinds:
            raise LossError(
                f"writing states for Megatron's optimizer {kind!r} in this layout is not supported",
                path=model.checkpoint.path,
                expected=f"--optimizer {' or '.join(self.kinds)}",
                found=f"--optimizer {kind}",
                hint="convert only the weights, to a format without optimizer states (hf)",
            )
        self.distributed = bool(self.args.get("use_distributed_optimizer", True))
        trained = (fqn for fqn, choice in model.chosen.items() if choice.tensor.role != BUFFER)
        tensors = model.checkpoint.tensors
        self.masters = {fqn: tensors.get((fqn, MASTER)) or tensors[fqn, WEIGHT] for fqn in trained}
        self.states: dict[str, dict[str, Tensor]] = {fqn: {} for fqn in self.masters}
        for (fqn, role), tensor in tensors.items():
            if role not in MODEL_ROLES:
                self.states[fqn][role] = tensor
        self._check_adam()
        self.apart = model.has_expert_optimizer
        self.groups = self._groups()

    def is_distributed(self, optimizer: str | None) -> bool:
        return self.distributed or (optimizer is not None and is_partly_distributed(self.args))

    def has(self, fqn: str) -> str | None:
        return stepped_by(fqn, len(self.masters[fqn].shape), self.args)

    def _check_adam(self) -> None:
        for fqn, states in self.states.items():
            if self.is_distributed(self.has(fqn)) and set(states) != set(ADAM):
                raise LossError(
                    "Megatron's distributed optimizer holds only Adam's states, for every parameter",
                    fqn=fqn,
                    expected=", ".join(ADAM),
                    found=", ".join(states) or "none",
                )

    def _groups(self) -> list[Group]:
        """Take options from a source group of this kind."""
        option_of = {fqn: group.options for group in self.model.checkpoint.state.param_groups for fqn in group.fqns}
        found: dict[Kind, Group] = {}
        for fqn, master in self.masters.items():
            own = self.model.spelling.spelled(fqn, self.model.kinds.get(split_layer(fqn)[0]), 0, 0)
            kind = self.kind(own, fqn, len(master.shape))
            if kind not in found:
                found[kind] = Group(self._options(dict(option_of.get(fqn, {})), *kind), *kind)
        return [found[kind] for kind in sorted(found, key=lambda kind: (kind[0], not kind[1], kind[2], str(kind[3])))]

    def _options(
        self, options: dict[str, Any], expert: bool, decayed: bool, decoupled: bool, optimizer: str | None
    ) -> dict[str, Any]:
        if not any(name in options or f"pre_{name}" in options for name in IDENTITY):
            options |= {
                "wd_mult": 1.0 if decayed else 0.0,
                "lr_mult": 1.0,
                "is_decoupled_lr": decoupled,
                "default_config": not decoupled,
            }
            # Else Megatron uses --lr. The current rate can't replace it: it has already decayed.
            if "initial_lr" in options:
                options["max_lr"] = options["initial_lr"]
        step = next(iter(self.model.checkpoint.state.scalars.get("step", {}).values()), None)
        if step is not None and self.is_distributed(optimizer):
            options.setdefault("step", step)
        return options | {"is_expert_parallel": expert}

    def kind(self, name: str, fqn: str, ndim: int) -> Kind:
        return (
            self.apart and is_expert(fqn),
            is_decayed(name, ndim, self.args),
            is_decoupled(name, self.args),
            stepped_by(name, ndim, self.args),
        )

    @property
    def chained(self) -> list[list[Group]]:
        layer_wise = bool(self.args.get("use_layer_wise_distributed_optimizer"))
        found: dict[tuple[bool, bool], list[Group]] = {} if is_of_matrices(self.args) else {(False, False): []}
        if self.apart and not is_of_matrices(self.args):
            found[False, True] = []
        for group in self.groups:
            found.setdefault((group.optimizer is not None, group.expert and not layer_wise), []).append(group)
        return [found[key] for key in sorted(found)]

    @property
    def scaler(self) -> dict[str, Any]:
        scaler = self.model.checkpoint.state.grad_scaler
        return {} if scaler is None else {"grad_scaler": scaler}
