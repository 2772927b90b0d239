"""Choice of tensor and dtype for each parameter in a weights-only target.

Weights stored in the model's dtype are kept. If only fp32 masters are stored (a ZeRO optimizer), the weights are the
masters rounded to the model's dtype, like in the engine after each step. No other cast happens without `--dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.plan.checkpoint import BUFFER, FIXED, MASTER, MODEL_ROLES, PART, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from ckpt.plan.tensors import Tensor

#: Dtypes that may be cast.
CAST_SOURCES = frozenset({FLOAT64, FLOAT32, BFLOAT16, FLOAT16})


class Choice(NamedTuple):
    tensor: Tensor
    dtype: DType

    @property
    def key(self) -> Key:
        return self.tensor[:2]

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.tensor.dtype


def choose(weight: Tensor | None, master: Tensor | None, dtype: DType | None) -> Choice:
    """Choose a parameter's tensor. `dtype` None keeps the model's own precision."""
    either = weight or master
    assert either is not None
    if dtype is None or either.dtype not in CAST_SOURCES:
        if weight is not None:
            return Choice(weight, weight.dtype)
        native = either.native if either.native in CAST_SOURCES and either.dtype in CAST_SOURCES else None
        return Choice(either, native or either.dtype)
    if weight is not None and weight.dtype == dtype:
        return Choice(weight, dtype)
    return Choice(master or either, dtype)


def choices(checkpoint: Checkpoint, dtype: DType | None) -> dict[str, Choice]:
    """Return one choice per parameter and buffer. Buffers and `checkpoint.uncast` are never cast."""
    of_roles: dict[str, dict[str, Tensor]] = {role: {} for role in MODEL_ROLES}
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role in of_roles:
            of_roles[role][fqn] = tensor
    weights, masters, buffers = of_roles.values()
    found = {fqn: Choice(buffer, buffer.dtype) for fqn, buffer in buffers.items()}
    uncast = checkpoint.uncast
    return found | {
        fqn: choose(weights.get(fqn), masters.get(fqn), None if fqn in uncast else dtype)
        for fqn in {**weights, **masters}
    }


def kept_in_training(checkpoint: Checkpoint, dtype: DType | None) -> dict[str, Choice]:
    """Return the tensors that an optimizer updates."""
    masters = {} if dtype is not None else {t.fqn: Choice(t, t.dtype) for t in checkpoint.with_role(MASTER)}
    return choices(checkpoint, dtype) | masters


def num_elements(chosen: Iterable[Choice]) -> dict[DType, int]:
    """Return the number of elements in floating parameters, by written dtype."""
    counts: dict[DType, int] = {}
    for choice in chosen:
        if choice.tensor.role != BUFFER and choice.dtype in CAST_SOURCES:
            counts[choice.dtype] = counts.get(choice.dtype, 0) + choice.tensor.numel
    return counts


def model_dtypes(checkpoint: Checkpoint, dtype: DType | None) -> dict[DType, int]:
    """Return the number of elements in the model's parameters by compute dtype.

    Empty if only the config knows: engines that train in fp32 and compute in 16 bits store no 16-bit weights.
    """
    counts = num_elements(choices(checkpoint, dtype).values())
    is_run = bool(checkpoint.optimizer_states or checkpoint.state.param_groups)
    has_master = any(True for _ in checkpoint.with_role(MASTER))
    main = max(counts, key=lambda one: counts[one], default=FLOAT32)
    return {} if dtype is None and is_run and not has_master and main == FLOAT32 else counts


def describe(
    chosen: Mapping[str, Choice],
    checkpoint: Checkpoint,
    requested: DType | None,
    record: str | None = None,
) -> list[str]:
    """Return notes on the chosen precision. `record` names the source of the run's own dtype."""
    parameters = [c for c in chosen.values() if c.tensor.role in (WEIGHT, MASTER)]
    masters = [c for c in parameters if c.tensor.role == MASTER]
    weights = [c for c in parameters if c.tensor.role == WEIGHT]
    has_master = {fqn for fqn, role in checkpoint.tensors if role == MASTER}
    rounded = [c for c in masters if c.is_cast]
    exact = [c for c in masters if not c.is_cast]
    beside = [c for c in weights if c.tensor.fqn in has_master] if has_master else []
    cast = [c for c in weights if c.is_cast]
    notes: list[str] = []
    if rounded:
        names = _dtypes(rounded)
        whose = "the model's dtype, " if requested is None else ""
        what = f"{_count(rounded)} written in {names}, {whose}rounded from the {_stored(rounded)} masters"
        notes.append(Brief(Message("{}; use {dtype=fp32} for the unrounded masters", what)))
    if exact:
        native = sorted({c.tensor.native.name for c in exact if c.tensor.native and c.tensor.native != c.dtype})
        other = Message("; {dtype=keep} writes the model's own dtype, {}", " and ".join(native))
        what = f"{_count(exact)} written bit for bit from the {_stored(exact)} masters"
        notes.append(Brief(what + other if native and requested else what))
    if beside:
        differ = any(checkpoint.tensors[c.tensor.fqn, MASTER].dtype != c.dtype for c in beside)
        what = f"{_count(beside)} written in {_stored(beside)}, the model's dtype"
        notes.append(Brief(what + Message("; use {dtype=fp32} for the fp32 masters") if differ else what))
    if cast and record:
        what = f"{_count(cast)} written in {_dtypes(cast)}, the run's compute dtype ({record}), rounded from "
        unrounded = Message("its {} weights; use {dtype=fp32} for the unrounded weights", _stored(cast))
        notes.append(Brief(what + unrounded))
    elif cast:
        what = Note("{} cast from {} to {} by {dtype}", _count(cast), _stored(cast), _dtypes(cast))
        is_narrower = any(c.dtype.itemsize < c.tensor.dtype.itemsize for c in cast)
        is_unknown = is_narrower and not checkpoint.has_all_buffers
        unknown = "; this architecture is unknown: some may need float32, and buffers may be among them"
        notes.append(what + f"{unknown} ({_first_name(cast)})" if is_unknown else Brief(what))
    notes += _exception_notes(cast, weights)
    parts = [c for c in parameters if requested is not None and checkpoint.uncast.get(c.tensor.fqn) == PART]
    if parts:
        what = pluralize(len(parts), "part")
        notes.append(Note("{} of quantized weights kept as they are: {dtype} never casts them", what))
    kept = [
        c
        for c in parameters
        if requested is not None and c.dtype != requested and c.tensor.fqn not in checkpoint.uncast
    ]
    if kept:
        only = "casts only fp64, fp32, bf16 and fp16"
        notes.append(Note("{} kept in {}: {dtype} {}", _count(kept), _dtypes(kept), only))
    wanted = {requested} if requested is not None else {c.dtype for c in cast}
    others = CAST_SOURCES - wanted if wanted and FLOAT32 not in wanted else ()
    fixed = [c for c in chosen.values() if c.dtype in others] if others else []
    if fixed := [c for c in fixed if c.tensor.role == BUFFER or checkpoint.uncast.get(c.tensor.fqn) == FIXED]:
        why = "buffers, and parameters that transformers keeps too"
        notes.append(f"{pluralize(len(fixed), 'tensor')} kept in {_dtypes(fixed)}: {why} ({_first_name(fixed)})")
    return notes


def _exception_notes(cast: list[Choice], weights: list[Choice]) -> Iterator[str]:
    """Name the tensors that are rounded although the others are stored in the written dtype."""
    exact = {c.dtype for c in weights if not c.is_cast} if cast else set()
    rounded = [c for c in cast if c.dtype in exact and c.tensor.dtype.itemsize > c.dtype.itemsize]
    if rounded:
        what = f"{pluralize(len(rounded), 'tensor')} rounded from {_stored(rounded)}, unlike the others"
        yield f"{what} ({_first_name(rounded)})"


def _count(chosen: list[Choice]) -> str:
    return pluralize(len(chosen), "parameter")


def _first_name(chosen: list[Choice]) -> str:
    return chosen[0].tensor.fqn + (", ..." if chosen[1:] else "")


def _dtypes(chosen: list[Choice]) -> str:
    return " and ".join(sorted({c.dtype.name for c in chosen}))


def _stored(chosen: list[Choice]) -> str:
    return " and ".join(sorted({c.tensor.dtype.name for c in chosen}))
