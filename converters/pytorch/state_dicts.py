"""What state dicts of torch hold, whoever wrote them: an optimizer's state has three spellings.

    nested    {"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn]}]}      get_optimizer_state_dict, FSDP
    flat      {"state.<fqn>.exp_avg": ..., "param_groups.<fqn>.lr": ...}             flatten_optimizer_state_dict=True
    numbered  {"state": {0: {...}}, "param_groups": [{..., "params": [0]}]}          optimizer.state_dict()

After torch 2.13: optim/optimizer.py (`state_dict`), distributed/fsdp/_optim_utils.py, and
distributed/checkpoint/state_dict.py (`_unflatten_optim_state_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.containers.sources import Sources
from ckpt.containers.torchfile.values import StoredTensor, is_part
from ckpt.plan.checkpoint import WEIGHT, Key, ParamGroup, TrainingState
from ckpt.plan.tensors import Shape, Tensor
from ckpt.state.numbered import names_by_shapes
from ckpt.state.wrapped import clean_names
from converters.names.transformers.ties import declared_ties
from converters.pytorch.optimizer_states import OptimizerStates
from converters.quantized.states import Quantized, understood

#: What to say of an optimizer that is left out; of a file's name.
UNPROVED = (
    "{}: the optimizer's states are left out: they are numbered, and the order of the model's parameters and their "
    "shapes do not prove which has which number"
)


@dataclass
class Reading:
    """What has been read so far of the state dicts in one folder."""

    folder: Path
    sources: Sources = field(default_factory=Sources)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    states: OptimizerStates = field(default_factory=OptimizerStates)

    def add_states(self, optimizer: Optimizer, shapes: Mapping[str, Shape], ties: Mapping[str, str], path: str) -> None:
        """Take the states of `optimizer`, whose file is `path`, for parameters of these `shapes`."""
        for fqn in {name for group in optimizer.groups for name in group.fqns} | set(optimizer.states):
            if ties.get(fqn, fqn) not in shapes:
                raise CorruptError("the optimizer has a parameter that the model does not have", path=path, fqn=fqn)
        for fqn, values in optimizer.states.items():
            owner = ties.get(fqn, fqn)
            if any(map(is_part, values.values())):
                raise NotFoundError("this file holds one rank's parts of the optimizer's states", path=path, fqn=fqn)
            self.states.add(owner, shapes[owner], values, path)
        self.scalars, self.groups = self.states.scalars, optimizer.groups

    def state(self, step: int | None) -> TrainingState:
        """The training state that has been read, after `step` steps."""
        known = {"step": step, "param_groups": self.groups, "scalars": self.scalars, "per_rank": self.per_rank}
        return TrainingState.of_entries("torch", self.items, **known)


def tie_as_declared(
    tensors: dict[Key, Tensor],
    ties: dict[str, str],
    config: Mapping[str, Any] | None,
    trained: Collection[str] | None = None,
) -> None:
    """Take a parameter that stands apart under two names as the one that it is, where the model's config says so.

    Gathering (FSDP2), sharding (FSDP1) and DCP write a tied parameter under each of its names, and then no file records
    that they are one.  The second becomes a replica of the first, and is compared with it, unless it has been trained
    by itself.  With `trained`, the names in the optimizer's groups, only where these list the first and not the second.
    """
    for alias, owner in declared_ties(config or {}).items():
        kept, again = tensors.get((str(owner), WEIGHT)), tensors.get((alias, WEIGHT))
        if kept is None or again is None or (kept.shape, kept.dtype) != (again.shape, again.dtype):
            continue
        if any(fqn == alias and role != WEIGHT for fqn, role in tensors):
            continue
        if trained is not None and (kept.fqn not in trained or alias in trained):
            continue
        tensors[kept.fqn, WEIGHT] = replace(kept, replicas=(*kept.replicas, again.source, *again.replicas))
        del tensors[alias, WEIGHT]
        ties[alias] = kept.fqn


@dataclass(frozen=True)
class Spelled:
    """An optimizer's state by the keys that the file itself has for parameters, and what in it is neither.

    Groups list these keys as their `params`.
    """

    states: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]
    left: dict[str, Any]


def take_apart(node: Mapping[str, Any], fqns: Collection[str] = ()) -> Spelled:
    """An optimizer's state in whatever spelling; `fqns` tell where a name ends in a flat one, as it may have dots."""
    left = {name: value for name, value in node.items() if name not in ("state", "param_groups")}
    states: dict[Any, dict[str, Any]] = {}
    for key, values in (node["state"] if isinstance(node.get("state"), Mapping) else {}).items():
        if isinstance(values, Mapping):
            states[key] = dict(values)
        else:
            left.setdefault("state", {})[key] = values
    listed = node.get("param_groups")
    groups = [dict(group) for group in listed if isinstance(group, Mapping)] if isinstance(listed, list) else []
    options: dict[str, dict[str, Any]] = {}
    for key in [key for key in left if isinstance(key, str)]:
        kind, _, rest = key.partition(".")
        if kind in ("state", "param_groups") and "." in rest:
            fqn, name = _split(rest, fqns)
            (states if kind == "state" else options).setdefault(fqn, {})[name] = left.pop(key)
    members: list[tuple[dict[str, Any], list[str]]] = []
    for fqn, chosen in options.items():  # which are repeated for every parameter: those with the same make a group
        same = next((params for known, params in members if _same(known, chosen)), None)
        if same is None:
            members.append((chosen, [fqn]))
        else:
            same.append(fqn)
    return Spelled(states, [*groups, *({**chosen, "params": params} for chosen, params in members)], left)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two sets of options are alike; numbers of different types are not."""
    return a.keys() == b.keys() and all(a[k] is b[k] or (type(a[k]) is type(b[k]) and a[k] == b[k]) for k in a)


def _split(text: str, fqns: Collection[str]) -> tuple[str, str]:
    """`<fqn>.<name>`, by the model's names where they are known."""
    fqn, _, name = text.rpartition(".")
    shorter = fqn
    while fqns and shorter and shorter not in fqns:
        shorter = shorter.rpartition(".")[0]
    return (shorter, text[len(shorter) + 1 :]) if shorter else (fqn, name)


def names_of(groups: Sequence[Mapping[str, Any]], order: Sequence[str] | None = None) -> dict[Any, str] | None:
    """The fqn of each key of `params`: itself, or what the groups record (`named_parameters`, since torch 2.6).

    `order` is the fqn of each number where that is known from elsewhere, and holds for a single param group.
    """
    members = [key for group in groups for key in group.get("params") or ()]
    if all(isinstance(key, str) and not key.isdigit() for key in members):
        return {key: key for key in members}
    recorded = [group.get("param_names") for group in groups]
    if all(isinstance(names, list) for names in recorded):
        fqns = [str(name) for names in recorded for name in names or ()]
        return dict(zip(members, fqns, strict=True)) if len(fqns) == len(members) else None
    if order is not None and len(groups) == 1 and members == list(range(len(order))):
        return dict(enumerate(order))
    return None


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's state by fqn."""

    states: Mapping[str, Mapping[str, Any]]
    groups: tuple[ParamGroup, ...]


def read_optimizer(content: Any, path: str, order: Sequence[str] | None = None) -> Optimizer | None:
    """The optimizer's state by fqn; None where the file numbers parameters and does not say which is which.

    `order` is as of `names_of`.  CorruptError where it is no such state.
    """
    if not isinstance(content, Mapping):
        raise CorruptError("this is no optimizer's state", path=path, expected="a dict", found=type(content).__name__)
    is_nested = isinstance(content.get("state"), Mapping) and isinstance(content.get("param_groups"), list)
    is_flat = all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in content)
    if not is_nested and not (content and is_flat):
        found = ", ".join(map(str, list(content)[:5]))
        raise CorruptError(
            "this is no optimizer's state", path=path, expected="`state` and `param_groups`", found=found
        )
    spelled = take_apart(content)
    if is_nested and (odd := spelled.left.get("state")):
        raise CorruptError("the optimizer's state of a parameter is no dict", path=path, fqn=str(next(iter(odd))))
    if not is_nested and spelled.left:
        odd = next(iter(spelled.left))
        raise CorruptError("the optimizer's state has an entry without a parameter", path=path, found=odd)
    complete = not is_nested or len(spelled.groups) == len(content["param_groups"])
    if not complete or not all(isinstance(group.get("params"), list) for group in spelled.groups):
        raise CorruptError("a param group is no dict with `params`", path=path)
    names = names_of(spelled.groups, order)
    if names is None:
        return None
    strangers = [key for key in spelled.states if key not in names]
    if strangers and is_nested:
        raise CorruptError(
            "the optimizer has states of a parameter that is in no param group", path=path, fqn=str(strangers[0])
        )
    names |= {key: key for key in strangers}
    clean = clean_names(names.values(), path)
    groups = tuple(
        ParamGroup(
            tuple(clean[names[key]] for key in group["params"]),
            {name: value for name, value in group.items() if name not in ("params", "param_names")},
        )
        for group in spelled.groups
    )
    return Optimizer({clean[names[key]]: values for key, values in spelled.states.items()}, groups)


def read_proved(content: Mapping[str, Any], path: str, parameters: Mapping[str, Shape]) -> Optimizer | None:
    """The state of an optimizer that `read_optimizer` finds no names in, by those that its shapes prove; None if none.

    `parameters` are the model's in the order in which it registers them.
    """
    spelled = take_apart(content)
    shapes = [[_shape(spelled.states.get(key, {})) for key in group["params"]] for group in spelled.groups]
    names = _names_of_groups(spelled.groups, shapes, parameters) or names_by_shapes(parameters, shapes)
    if names is None:
        return None
    named = [{**group, "param_names": list(fqns)} for group, fqns in zip(spelled.groups, names, strict=True)]
    return read_optimizer({**content, "param_groups": named}, path)


def _names_of_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[Shape | None]], parameters: Mapping[str, Shape]
) -> list[tuple[str, ...]] | None:
    """What groups of one parameter each are called (Adam-mini's), if these are parameters of as many elements."""
    names = [name for group in groups if isinstance(name := group.get("name"), str) and name in parameters]
    if len(set(names)) < len(groups) or any(len(held) != 1 for held in shapes):
        return None
    fit = all(
        prod(held or parameters[name]) == prod(parameters[name]) for name, (held,) in zip(names, shapes, strict=True)
    )
    return [(name,) for name in names] if fit else None


def _shape(states: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter by its states; None where they do not tell it."""
    stored = {name: value for name, value in understood(states).items() if isinstance(value, Quantized | StoredTensor)}
    if stored.keys() >= {"exp_avg_sq_row", "exp_avg_sq_col"}:  # Adafactor's, of sums
        return (*stored["exp_avg_sq_row"].shape, *stored["exp_avg_sq_col"].shape[-1:])
    if stored.keys() >= {"row_var", "col_var"}:  # torch's own Adafactor
        return (*stored["row_var"].shape[:-1], *stored["col_var"].shape[-1:])
    shapes = [value.shape for name, value in stored.items() if name != "step"]
    return max(shapes, key=prod, default=None)


#: Where trainers keep the number of steps taken, in a dict of their own.
_COUNTS = ("step", "global_step", "global_steps", "iteration")


def step_of(items: Mapping[str, Any]) -> int | None:
    """The step that a training state records, at its root or in `train_state`."""
    inner = items.get("train_state")
    for place in (items, inner if isinstance(inner, Mapping) else {}):
        for name in _COUNTS:
            if type(place.get(name)) is int:
                return int(place[name])
    return None
