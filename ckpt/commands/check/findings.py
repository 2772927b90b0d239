"""Findings about values: damage (NaN, infinities, contradicting parts) and remarkable values.

Only equal experts and unchanged tensors with equal samples are compared in full.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.base.text import pluralize
from ckpt.commands.check.finding import (
    CONSTANT,
    CONTRADICTION,
    EQUAL,
    NOT_FINITE,
    SCALE,
    UNCHANGED,
    UNTRAINED,
    ZERO,
    ValueFinding,
)
from ckpt.move.reading import read_box
from ckpt.move.values import FLOATS, Values, bits_of, scan
from ckpt.plan import services
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, WEIGHT, Checkpoint, Key
from ckpt.plan.tensors import Box, Shape, Tensor

if TYPE_CHECKING:
    from ckpt.plan.protocols import QuantizedWeightsProtocol

_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<number>\d+)(?P<after>\..*)")
_STACK = re.compile(r".*\.experts\.\w+")
_FACTOR = re.compile(r"(.*\.)?lora_(embedding_)?B(\..*)?")
_ADAPTER = re.compile(r"(.*\.)?(lora_|modules_to_save\.)")
#: Equal values in smaller tensors may be a coincidence.
_MIN_CONSTANT = 16
_SAMPLE = 4096  # bytes
_BLOCK = 8 << 20  # bytes per comparison


def findings(
    checkpoint: Checkpoint, before: Checkpoint | None, progress: Callable[[int], None] | None = None
) -> list[ValueFinding]:
    """Return the findings, damage first. `before` is the previous step."""
    weights = services.quantization.quantized_weights(checkpoint)
    values = scan(checkpoint.tensors, checkpoint.computed, weights.exponents, progress)
    found = [*_value_findings(checkpoint, values, weights.parts, weights.packed)]
    found += _part_findings(checkpoint, weights)
    found += _equal_experts(checkpoint, values)
    if before is not None:
        found += _unchanged(checkpoint, before)
    return sorted(found, key=lambda one: not one.is_damage)


def _value_findings(
    checkpoint: Checkpoint, values: Mapping[Key, Values], parts: frozenset[str], packed: frozenset[str]
) -> Iterator[ValueFinding]:
    for (fqn, role), one in values.items():
        tensor = checkpoint.tensors[fqn, role]
        if one.nans or one.infinities:
            yield _not_finite(fqn, role, one)
        is_float = tensor.dtype.name in FLOATS
        if tensor.numel < 2 or not (is_float or fqn in packed):
            continue
        if one.is_zero:
            is_factor = role in MODEL_ROLES and _FACTOR.fullmatch(fqn) is not None
            yield ValueFinding(UNTRAINED if is_factor else ZERO, fqn, role, "all zero", tensor.numel)
        elif one.is_constant and fqn not in parts and tensor.numel >= _MIN_CONSTANT:
            yield ValueFinding(CONSTANT, fqn, role, _constant(one), tensor.numel)


def _not_finite(fqn: str, role: str, one: Values) -> ValueFinding:
    first = one.first_infinity if one.first_nan is None else one.first_nan
    assert first is not None
    count = one.nans + one.infinities
    return ValueFinding(NOT_FINITE, fqn, role, one.not_finite, count, one.index(first), one.is_damaged(fqn))


def _index(flat: int, shape: Shape) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


def _constant(one: Values) -> str:
    views = {"float32": "u4 f4", "float64": "u8 f8", "float16": "u2 f2"}
    bits, name = one.single, one.dtype.name
    if bits is None:
        return "constant"
    if name == "bfloat16":
        bits, name = bits << 16, "float32"
    if name not in views:
        return "constant"
    unsigned, floating = views[name].split()
    return f"every value is {np.array([bits], unsigned).view(floating)[0]:g}"


def _part_findings(checkpoint: Checkpoint, weights: QuantizedWeightsProtocol) -> Iterator[ValueFinding]:
    for name in weights.scales:
        tensor = checkpoint.tensors[name, _role(checkpoint, name)]
        bits = _all_bits(checkpoint, tensor)
        size = bits.dtype.itemsize
        is_wrong = (bits == 0) | (bits >= (1 << (8 * size - 1)))
        if is_wrong.any():
            first = _index(int(np.argmax(is_wrong)), tensor.shape)
            count = int(is_wrong.sum())
            yield ValueFinding(
                SCALE,
                name,
                tensor.role,
                f"{pluralize(count, 'scale')} {'is' if count == 1 else 'are'} zero or negative",
                count,
                first,
            )
    for name, limit in weights.indices.items():
        tensor = checkpoint.tensors[name, _role(checkpoint, name)]
        index = _all_bits(checkpoint, tensor).view(np.int32)
        if (is_wrong := (index < 0) | (index >= limit)).any():
            first, count = _index(int(np.argmax(is_wrong)), tensor.shape), int(is_wrong.sum())
            numbers = pluralize(tensor.numel, "group number")
            what = f"{count} of {numbers} are not in 0 to {limit - 1}, the first at {list(first)}"
            yield ValueFinding(CONTRADICTION, name, tensor.role, what, count, first, is_damage=True)
    for name, shape in weights.recorded_shapes.items():
        tensor = checkpoint.tensors[name, _role(checkpoint, name)]
        recorded = tuple(_all_bits(checkpoint, tensor).view(f"i{tensor.dtype.itemsize}").tolist())
        if not weights.is_packed_shape(shape, recorded):
            what = f"it records the shape {list(recorded)}, and the packed values are those of {list(shape)}"
            yield ValueFinding(CONTRADICTION, name, tensor.role, what, 1, (0,), is_damage=True)


def _role(checkpoint: Checkpoint, fqn: str) -> str:
    return next(role for role in MODEL_ROLES if (fqn, role) in checkpoint.tensors)


def _all_bits(checkpoint: Checkpoint, tensor: Tensor) -> Any:
    bits = bits_of(tensor, Box((0,) * len(tensor.shape), tensor.shape), checkpoint.computed)
    return bits.view(f"u{bits.dtype.itemsize}")


@dataclass(frozen=True, slots=True)
class _Expert:
    number: int
    tensor: Tensor
    box: Box


def _equal_experts(checkpoint: Checkpoint, values: Mapping[Key, Values]) -> Iterator[ValueFinding]:
    for experts in _experts(checkpoint, values):
        alike: dict[bytes, list[_Expert]] = defaultdict(list)
        for one in experts:
            alike[_sample(checkpoint, one.tensor, one.box)].append(one)
        for group in alike.values():
            same: dict[bytes, list[_Expert]] = defaultdict(list)
            for one in group if len(group) > 1 else ():
                same[_digest(checkpoint, one.tensor, one.box)].append(one)
            for equal in same.values():
                if len(equal) > 1:
                    first, numbers = equal[0].tensor, [one.number for one in equal]
                    what = "experts " + ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
                    yield ValueFinding(EQUAL, first.fqn, first.role, what, len(equal), (numbers[0],))


def _experts(checkpoint: Checkpoint, values: Mapping[Key, Values]) -> Iterator[list[_Expert]]:
    apart: dict[tuple[str, str, str], list[_Expert]] = defaultdict(list)
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role not in (WEIGHT, MASTER) or not tensor.numel or values[fqn, role].is_constant:
            continue
        if (match := _EXPERT.fullmatch(fqn)) is not None:
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            if len(tensor.shape) > 1:
                apart[match["before"], match["after"], role].append(_Expert(int(match["number"]), tensor, whole))
        elif len(tensor.shape) > 2 and _STACK.fullmatch(fqn):
            rest = tensor.shape[1:]
            boxes = (Box((number, *(0,) * len(rest)), (1, *rest)) for number in range(tensor.shape[0]))
            yield [_Expert(number, tensor, box) for number, box in enumerate(boxes)]
    yield from apart.values()


def _unchanged(checkpoint: Checkpoint, before: Checkpoint) -> Iterator[ValueFinding]:
    for fqn in dict.fromkeys(fqn for fqn, _ in checkpoint.tensors):
        role = MASTER if (fqn, MASTER) in checkpoint.tensors else WEIGHT
        now, then = checkpoint.get(fqn, role), before.get(fqn, role)
        if now is None or then is None or not now.numel or (now.dtype, now.shape) != (then.dtype, then.shape):
            continue
        box = Box((0,) * len(now.shape), now.shape)
        if (
            _is_trainable(checkpoint, fqn)
            and _sample(checkpoint, now, box) == _sample(before, then, box)
            and _digest(checkpoint, now, box) == _digest(before, then, box)
        ):
            yield ValueFinding(UNCHANGED, fqn, role, "the same bits as in the step before", now.numel)


def _is_trainable(checkpoint: Checkpoint, fqn: str) -> bool:
    states: Sequence[str] = checkpoint.optimizer_states
    return any((fqn, role) in checkpoint.tensors for role in states) or _ADAPTER.match(fqn) is not None


def _sample(checkpoint: Checkpoint, tensor: Tensor, box: Box) -> bytes:
    if not box.sizes:
        return _read_bytes(checkpoint, tensor, box)
    last = min(box.sizes[-1], _SAMPLE // tensor.dtype.itemsize)
    sizes = (*(1 for _ in box.sizes[:-1]), last)
    ends = tuple(offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True))
    places = (box.offsets, (*ends[:-1], box.offsets[-1]))
    return b"".join(_read_bytes(checkpoint, tensor, Box(place, sizes)) for place in places)


def _digest(checkpoint: Checkpoint, tensor: Tensor, box: Box) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    axis = next((number for number, size in enumerate(box.sizes) if size > 1), None)
    if axis is None:
        found.update(_read_bytes(checkpoint, tensor, box))
        return found.digest()
    row = prod(box.sizes[axis + 1 :]) * tensor.dtype.itemsize
    step = max(1, _BLOCK // max(1, row))
    for first in range(0, box.sizes[axis], step):
        count = min(step, box.sizes[axis] - first)
        offsets = (*box.offsets[:axis], box.offsets[axis] + first, *box.offsets[axis + 1 :])
        found.update(_read_bytes(checkpoint, tensor, Box(offsets, (*box.sizes[:axis], count, *box.sizes[axis + 1 :]))))
    return found.digest()


def _read_bytes(checkpoint: Checkpoint, tensor: Tensor, box: Box) -> bytes:
    content: bytes = read_box(tensor, box, checkpoint.computed).tobytes()
    return content
