"""Content of a DeepSpeed checkpoint for any source: groups in flattening order, masters, states, weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Note
from ckpt.containers.torchfile.values import Record
from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, WEIGHT, Checkpoint, Key, ParamGroup, TrainingState
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType
from ckpt.plan.precision import CAST_SOURCES, Choice, choices
from ckpt.plan.tensors import Tensor
from ckpt.state import adam, positions
from ckpt.state.skipped_states import listed
from converters.deepspeed.config import is_enabled, section
from converters.deepspeed.keys import AUTOEP_EXPERTS, EXPERT, MODEL_FILE, MODEL_STATE, PIPELINE

#: Written for sources from other frameworks.
VERSION = "0.19.8"

_FIELDS = (*MODEL_STATE, "loss_scaler", "ds_config", "client_state", "extra_state")


@dataclass(frozen=True, slots=True)
class DeepSpeedModel:
    """Model and optimizer in DeepSpeed's terms.

    `resumable` is False if the source does not record groups; then `groups` has one per parameter. `weights` has every
    parameter, `masters` the trainable ones. `states` has tensors by fqn and role, `scalars` numbers by name and fqn.
    """

    checkpoint: Checkpoint
    groups: tuple[ParamGroup, ...]
    resumable: bool
    weights: Mapping[str, Choice]
    masters: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]
    left_out: Mapping[Key, str]
    notes: tuple[str, ...]
    #: Written as `elastic_checkpoint`: the source lacks hyperparameters.
    is_elastic: bool = False
    #: Numbers, except steps, that differ inside a group, for example Adafactor's RMS.
    uneven_numbers: tuple[str, ...] = ()

    @property
    def frozen(self) -> list[str]:
        """Parameters outside the optimizer: frozen, or empty."""
        return [fqn for fqn in self.weights if fqn not in self.masters]

    @property
    def state(self) -> TrainingState:
        return self.checkpoint.state

    @property
    def dtype(self) -> DType:
        """Dtype of most model elements.

        Frozen parameters from other frameworks don't count.
        """
        counts: dict[DType, int] = {}
        trained = [self.weights[fqn] for fqn in self.masters] if not self.is_deepspeed else []
        for choice in trained or self.weights.values():
            counts[choice.dtype] = counts.get(choice.dtype, 0) + choice.tensor.numel
        return max(counts, key=lambda dtype: counts[dtype], default=FLOAT32)

    @property
    def samples(self) -> int | None:
        return positions.sequences_seen(self.state)

    @property
    def schedule(self) -> Any:
        """The source's LR schedule state, or the position after its steps."""
        recorded, steps = self.state.lr_scheduler, self.state.step
        if recorded is not None or self.is_deepspeed or steps is None or not self.states:
            return recorded
        return positions.deepspeed_schedule(steps)

    @property
    def ties(self) -> Mapping[str, str]:
        return _ties(self.checkpoint)

    @property
    def is_deepspeed(self) -> bool:
        return _is_deepspeed(self.checkpoint)

    @property
    def version(self) -> str:
        return str((self.state.engine_version if self.is_deepspeed else None) or VERSION)

    def roles(self, fqns: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(role for fqn in fqns for role in self.states.get(fqn, ())))

    def master_dtype(self, fqns: Sequence[str]) -> DType:
        """Return fp32, unless all masters share another dtype."""
        masters = [self.masters[fqn] for fqn in fqns]
        stored = {master.dtype for master in masters}
        if len(stored) == 1 and all(master.role == MASTER for master in masters):
            return stored.pop()
        return FLOAT32

    def state_dtype(self, fqns: Iterable[str], role: str) -> DType:
        """Return fp32 if the parameters' states differ."""
        stored = {self.states[fqn][role].dtype for fqn in fqns if role in self.states.get(fqn, ())}
        return stored.pop() if len(stored) == 1 else FLOAT32

    def numbers(self, fqns: Sequence[str]) -> dict[str, Any]:
        """Return numbers equal for all these parameters.

        Raise LossError if steps differ: a flat buffer has only one.
        """
        found: dict[str, Any] = {}
        for name, values in self.checkpoint.state.scalars.items():
            for fqn in fqns if name not in self.uneven_numbers else ():
                if fqn in values and found.setdefault(name, values[fqn]) != values[fqn]:
                    raise LossError(
                        f"parameters in one group have taken different numbers of steps ({name}): ZeRO's flat "
                        "buffers cannot store this",
                        fqn=fqn,
                        expected=f"{name} {found[name]}",
                        found=f"{name} {values[fqn]}",
                    )
        return found

    @property
    def dropped(self) -> list[str]:
        why = "parameters in one group have different values, and ZeRO's flat buffers store one"
        return [f"optimizer state {name}: {why}" for name in self.uneven_numbers]


def _is_deepspeed(checkpoint: Checkpoint) -> bool:
    return checkpoint.state.engine == "deepspeed"


def describe(
    checkpoint: Checkpoint, dtype: DType | None, *, may_be_elastic: bool = False, may_have_experts: bool = False
) -> DeepSpeedModel:
    """Describe `checkpoint`. `dtype` None keeps the model's own."""
    refuse_experts(
        (fqn for fqn, _ in checkpoint.tensors), checkpoint.state.ds_config or {}, but_native=may_have_experts
    )
    recorded = None if dtype is not None else _recorded_dtype(checkpoint)
    dtype = dtype or recorded
    ties = _ties(checkpoint)
    chosen = {fqn: choice for fqn, choice in choices(checkpoint, dtype).items() if fqn not in ties}
    buffers = {fqn: choice.tensor for fqn, choice in chosen.items() if _is_buffer(choice.tensor)}
    weights = {fqn: choice for fqn, choice in chosen.items() if fqn not in buffers}
    groups, resumable = _param_groups(checkpoint, weights)
    known = () if resumable or not may_be_elastic else _elastic_groups(checkpoint, weights)
    groups = list(known) or groups
    trained = (fqn for group in groups for fqn in group.fqns)
    masters = {fqn: checkpoint.get(fqn, MASTER) or checkpoint.tensors[fqn, WEIGHT] for fqn in trained}
    kept = _kept_as_stored(checkpoint, weights, masters, resumable)
    weights |= kept
    states, left_out = _states(checkpoint, masters)
    if not _is_deepspeed(checkpoint):
        groups = [_completed(group, states) for group in groups]
    notes = [
        *_dtype_notes(checkpoint, dtype, recorded),
        *_kept_notes(kept),
        *_gap_notes(groups, states),
        *_unknown_group_notes(resumable, bool(known)),
        *_schedule_notes(checkpoint),
    ]
    left_out |= {key: f"{key[0]}: the same tensor as {ties[key[0]]}" for key in checkpoint.tensors if key[0] in ties}
    return DeepSpeedModel(
        checkpoint,
        tuple(groups),
        resumable,
        weights,
        masters,
        states,
        buffers,
        left_out,
        tuple(notes),
        bool(known),
        tuple(_uneven_numbers(checkpoint, groups)),
    )


def refuse_experts(fqns: Iterable[str], config: Mapping[str, Any], *, but_native: bool = False) -> None:
    """Raise UsageError for experts. `but_native` allows DeepSpeed's MoE layers."""
    auto = config.get("expert_parallel")
    is_auto = isinstance(auto, Mapping) and bool(auto.get("enabled"))
    if expert := next(
        (
            fqn
            for fqn in fqns
            if (not but_native and EXPERT.fullmatch(fqn)) or (is_auto and AUTOEP_EXPERTS.fullmatch(fqn))
        ),
        None,
    ):
        raise UsageError(
            "DeepSpeed loads shared experts from separate files, and ckpt does not write them",
            fqn=expert,
            hint="hf, full and dcp hold all experts, like the model at ep_size 1",
        )


def _recorded_dtype(checkpoint: Checkpoint) -> DType | None:
    """Return the config's dtype for a model trained with float32 weights."""
    config = checkpoint.config or {}
    named = BY_NAME.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    stored = {tensor.dtype for tensor in checkpoint.with_role(WEIGHT)}
    if _is_deepspeed(checkpoint) or named not in (BFLOAT16, FLOAT16) or stored != {FLOAT32}:
        return None
    return named


def _dtype_notes(checkpoint: Checkpoint, dtype: DType | None, recorded: DType | None) -> Iterator[str]:
    if recorded is not None:
        what = f"the config's dtype is {recorded}, so float32 weights became masters"
        yield Note("{}; use {dtype=fp32} for a float32 model", what)
    elif dtype is None and checkpoint.state.ds_config is None:
        yield Note("no DeepSpeed config is recorded: the files keep the model's stored precision ({dtype})")


def _kept_as_stored(
    checkpoint: Checkpoint, weights: Mapping[str, Choice], masters: Mapping[str, Tensor], resumable: bool
) -> dict[str, Choice]:
    """Don't cast tensors outside the optimizer if the source mixes buffers and frozen parameters.

    An engine rounds frozen parameters on loading, but keeps buffers.
    """
    if _is_deepspeed(checkpoint) or not resumable or checkpoint.has_all_buffers:
        return {}
    others = {fqn: choice for fqn, choice in weights.items() if fqn not in masters and choice.is_cast}
    return {fqn: Choice(choice.tensor, choice.tensor.dtype) for fqn, choice in others.items()}


def _kept_notes(kept: Mapping[str, Choice]) -> Iterator[str]:
    if kept:
        yield (
            f"{listed(list(kept))} kept as stored: the source does not separate frozen parameters from buffers; "
            "DeepSpeed rounds frozen parameters on load"
        )


def _ties(checkpoint: Checkpoint) -> dict[str, str]:
    found = {fqn for fqn, _ in checkpoint.tensors}
    return {alias: owner for alias, owner in checkpoint.ties.items() if owner in found}


def _is_buffer(tensor: Tensor) -> bool:
    """Return True for a buffer. Without roles, this includes dtypes that no optimizer takes."""
    return tensor.role == BUFFER or (tensor.role == WEIGHT and tensor.dtype not in CAST_SOURCES)


# -- groups ------------------------------------------------------------------------------------------------------------


def _param_groups(checkpoint: Checkpoint, weights: Mapping[str, Choice]) -> tuple[list[ParamGroup], bool]:
    known = _known_groups(checkpoint, weights)
    if known and all(group.options for group in known):
        return known, True
    names = [fqn for group in known for fqn in group.fqns] or _trainable(checkpoint, weights)
    return [ParamGroup((fqn,), {}) for fqn in names], False


def _elastic_groups(checkpoint: Checkpoint, weights: Mapping[str, Choice]) -> list[ParamGroup]:
    known = _known_groups(checkpoint, weights) if _is_deepspeed(checkpoint) else []
    roles: dict[str, set[str]] = {}
    for fqn, role in checkpoint.tensors:
        if role in checkpoint.optimizer_states:
            roles.setdefault(fqn, set()).add(role)
    kinds = {frozenset(role for fqn in group.fqns for role in roles.get(fqn, ())) for group in known}
    return known if len(kinds) == 1 and any(kinds) else []


def _known_groups(checkpoint: Checkpoint, weights: Mapping[str, Choice]) -> list[ParamGroup]:
    """Use each parameter's own name once, without empty ones."""
    found: list[ParamGroup] = []
    taken: set[str] = set()
    for group in checkpoint.state.param_groups:
        fqns = []
        for name in group.fqns:
            fqn = checkpoint.ties.get(name, name)
            if fqn not in weights:
                raise LossError("a parameter group names a parameter missing from the source", fqn=name)
            if fqn not in taken and weights[fqn].tensor.numel:
                fqns.append(fqn)
                taken.add(fqn)
        if fqns:
            found.append(ParamGroup(tuple(fqns), group.options))
    astray = [fqn for fqn, role in checkpoint.tensors if role == MASTER and fqn in weights and fqn not in taken]
    if found and astray:
        raise LossError("a parameter has a master, but no parameter group names it", fqn=astray[0])
    return found


def _completed(group: ParamGroup, states: Mapping[str, Mapping[str, Tensor]]) -> ParamGroup:
    roles = {role for fqn in group.fqns for role in states.get(fqn, ())}
    if not adam.is_adam(group.options, roles):
        return group
    return ParamGroup(group.fqns, {**group.options, **adam.missing_for_deepspeed(group.options)})


def _trainable(checkpoint: Checkpoint, weights: Mapping[str, Choice]) -> list[str]:
    others = {fqn for fqn, role in checkpoint.tensors if role not in MODEL_ROLES}
    for names in ({fqn for fqn, role in checkpoint.tensors if role == MASTER}, others):
        if found := [fqn for fqn in weights if fqn in names]:
            return found
    return [fqn for fqn, choice in weights.items() if choice.tensor.numel]


def _unknown_group_notes(resumable: bool, is_elastic: bool) -> Iterator[str]:
    if is_elastic:
        yield (
            "the source records no hyperparameters: load this with elastic_checkpoint, and DeepSpeed uses its "
            "config's, including the first learning rate"
        )
    elif not resumable:
        yield (
            "the source records no parameter groups with hyperparameters, so DeepSpeed resumes no optimizer from this: "
            "load it with load_checkpoint(..., load_optimizer_states=False)"
        )


def _schedule_notes(checkpoint: Checkpoint) -> Iterator[str]:
    if not _is_deepspeed(checkpoint) and checkpoint.state.lr_scheduler is None:
        yield (
            "DeepSpeed's files get no LR schedule: if DeepSpeed has the scheduler, "
            + (
                "load this with load_checkpoint(..., load_lr_scheduler_states=False)"
                if checkpoint.state.step is None or not checkpoint.optimizer_states
                else f"it continues from its config after {pluralize(checkpoint.state.step or 0, 'step')}"
            )
        )


# -- states ------------------------------------------------------------------------------------------------------------


def _states(
    checkpoint: Checkpoint, masters: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], dict[Key, str]]:
    states: dict[str, dict[str, Tensor]] = {}
    misfits: list[Key] = []
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role in MODEL_ROLES:
            continue
        if fqn in masters and tensor.shape == masters[fqn].shape:
            states.setdefault(fqn, {})[role] = tensor
        else:
            misfits.append((fqn, role))
    by_role: dict[str, list[str]] = {}
    for fqn, role in sorted(misfits):
        by_role.setdefault(role, []).append(fqn)
    left_out: dict[Key, str] = {}
    for role, fqns in by_role.items():
        why = "its shape differs from the parameter, and ZeRO's flat buffers need the same shape"
        left_out |= dict.fromkeys(((fqn, role) for fqn in fqns), f"optimizer state {role} of {listed(fqns)}: {why}")
    return states, left_out


def _uneven_numbers(checkpoint: Checkpoint, groups: Sequence[ParamGroup]) -> Iterator[str]:
    for name, values in checkpoint.state.scalars.items():
        held = ({values[fqn] for fqn in group.fqns if fqn in values} for group in groups)
        if not name.endswith("step") and any(len(numbers) > 1 for numbers in held):
            yield name


def _gap_notes(groups: Iterable[ParamGroup], states: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """Note parameters without a gradient; DeepSpeed fills in zeros."""
    gaps: dict[str, list[str]] = {}
    for group in groups:
        for role in dict.fromkeys(role for fqn in group.fqns for role in states.get(fqn, ())):
            missing = [fqn for fqn in group.fqns if role not in states.get(fqn, ())]
            if missing:
                gaps.setdefault(role, []).extend(missing)
    for role, fqns in gaps.items():
        yield (f"optimizer state {role} of {listed(fqns)} is missing from the source: wrote zeros")


# -- records -----------------------------------------------------------------------------------------------------------


def zero_options(checkpoint: Checkpoint) -> Mapping[str, Any]:
    options = (checkpoint.state.ds_config or {}).get("zero_optimization")
    return options if isinstance(options, Mapping) else {}


def ds_config(model: DeepSpeedModel, stage: int, requested: DType | None) -> tuple[dict[str, Any], list[str]]:
    """Return the config with the written stage and precision, and notes.

    It is only a record: a run has its own config.
    """
    recorded = model.state.ds_config
    config = dict(recorded or {})
    options = dict(zero_options(model.checkpoint)) | {"stage": stage}
    notes = []
    if stage == 3 and options.get("elastic_checkpoint"):
        options["elastic_checkpoint"] = False
        notes.append("ds_config: elastic_checkpoint is off, because ZeRO-3 does not support it")
    config["zero_optimization"] = options
    if requested is not None or not recorded:  # else the run's own config decides
        config |= {
            "bf16": section(config, "bf16") | {"enabled": model.dtype == BFLOAT16},
            "fp16": section(config, "fp16") | {"enabled": model.dtype == FLOAT16},
        }
    if section(options, "offload_optimizer").get("device") == "nvme":
        notes.append(
            "ds_config: the run offloads its optimizer to NVMe and would look for swap files; the state is in the "
            "optimizer files, so resume without offload_optimizer or with its device cpu"
        )
    return config, notes


def loss_scaler(model: DeepSpeedModel, config: Mapping[str, Any]) -> Record:
    """Return the source's loss scaler, or DeepSpeed's initial one (runtime/fp16/loss_scaler.py)."""
    recorded = model.state.loss_scaler
    if isinstance(recorded, Record):
        return recorded
    module = "deepspeed.runtime.fp16.loss_scaler"
    if not is_enabled(config, "fp16"):
        return Record(module, "LossScaler", state={"cur_scale": 1.0, "dynamic": False})
    fp16 = section(config, "fp16")
    if fp16.get("loss_scale"):
        return Record(module, "LossScaler", state={"cur_scale": fp16["loss_scale"], "dynamic": False})
    hysteresis = fp16.get("hysteresis", 2)
    state = {
        "cur_scale": 2 ** fp16.get("initial_scale_power", 16),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": FLOAT16,
    }
    return Record(module, "DynamicLossScaler", state=state)


def optimizer_items(model: DeepSpeedModel) -> dict[str, Any]:
    scaler = {} if model.state.loss_scaler is None else {"loss_scaler": model.state.loss_scaler}
    return scaler | dict(model.state.private.get("deepspeed", {}))


def client_state(model: DeepSpeedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the user's entries, training state without a place in DeepSpeed, and notes."""
    state = model.state
    client = dict(state.client_state or {})
    dropped = []
    if not model.is_deepspeed:
        known = (*_FIELDS, *state.private.get("deepspeed", {}))
        client |= {name: value for name, value in state.entries().items() if name not in known}
    pipeline = state.private.get("megatron-deepspeed", {}).get(PIPELINE)
    if isinstance(pipeline, Mapping) and pipeline.get("of_slices"):
        dropped.append(f"training state of the pipeline's ranks: {', '.join(pipeline['of_slices'])}")
    for name in [name for name in client if name in MODEL_FILE]:
        del client[name]
        dropped.append(f"training state {name!r}: DeepSpeed's files use this name")
    return client, dropped
