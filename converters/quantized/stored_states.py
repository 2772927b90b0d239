"""Quantized optimizer states carried as stored: codes and factors, bit for bit, if the cuts are between blocks.

A target's part must start and end between blocks of every source part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.subclass import wrapper
from ckpt.containers.torchfile.values import Record
from ckpt.containers.torchfile.write import Bytes, FromSource, NewTensor, Part
from ckpt.move.source import opened, read_at
from ckpt.plan.checkpoint import Checkpoint, Key
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box, Extent, FlatRange, Shape, Tensor, Whole, flat_range
from converters.quantized.states import Quantized, Stored

_HINT = Message("{optimizer_dtype=fp32} writes the values the optimizer computes from them")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A target's tensors for a state quantized by bitsandbytes."""

    codes: NewTensor
    factors: NewTensor
    values: NewTensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements `start` to `stop` of the parameter, in row-major order, stored as part `number`."""

    number: int
    start: int
    stop: int
    quantized: Quantized | None


# -- source ----------------------------------------------------------------------------------------------------


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """Replace computed values by the tensors in which quantized states are stored."""
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in checkpoint.quantized.blocks}
    for key, stored in checkpoint.quantized.blocks.items():
        for number, extents in enumerate(_extents(stored)):
            for name, extent in extents.items():
                part = _part_key(key, name, number)
                tensors[part] = Tensor(*part, extent.dtype, (extent.numel,), Whole(extent.reshape((extent.numel,))))
    return replace(checkpoint, tensors=tensors)


def _part_key(key: Key, name: str, number: int) -> Key:
    return key[0], f"{key[1]}: {name} of part {number}"


def _extents(stored: Stored) -> Iterator[dict[str, Extent]]:
    for part in stored.parts.values():
        yield {"codes": part.codes, "factors": part.factors}
    for fragment in stored.plain:
        yield {"values": fragment.extent}


# -- target ----------------------------------------------------------------------------------------------------


def carried(key: Key, stored: Stored, box: Box) -> NewTensor | Record | Blocks:
    """Return the target's content for the part `box` of a state: a torchao object, `Blocks`, or plain fp32.

    Raise LossError if the cuts split blocks, or its parts are stored in different ways.
    """
    whole = flat_range(box, stored.shape)
    pieces = None if whole is None else _pieces(stored)
    if whole is None or pieces is None:
        raise _refused(key, "it is not cut along the first dim only")
    held = [one for one in pieces if one.start < whole.stop and whole.start < one.stop]
    if all(one.quantized is None for one in held):
        return NewTensor(FLOAT32, box.sizes, tuple(_from(key, "values", one, whole, 1) for one in held))
    kinds = {_kind_of_part(one.quantized) for one in held}
    if len(kinds) != 1 or held[0].quantized is None:
        raise _refused(key, "its parts are stored in different ways, and the target joins them")
    first = held[0].quantized
    for one in held:
        low, high, size = max(one.start, whole.start), min(one.stop, whole.stop), first.block_size
        ends_with_both = high == whole.stop == one.stop
        inside = (low - one.start, low - whole.start, *(() if ends_with_both else (high - one.start,)))
        if any(offset % size for offset in inside):
            raise _refused(key, f"blocks of {pluralize(size, 'element')} do not match the cuts between ranks")
    return _put_together(key, first, held, whole, box.sizes)


def carried_tensor(key: Key, stored: Stored, box: Box) -> NewTensor | Record:
    """Return `carried` for formats that only hold tensors: torchao's states, not bitsandbytes'."""
    found = carried(key, stored, box)
    if isinstance(found, Blocks):
        raise _refused(key, "bitsandbytes keeps it in several tensors, and only `full` can hold them")
    return found


def _pieces(stored: Stored) -> list[_Piece] | None:
    found: list[_Piece] = []
    regions = [*((box, part) for box, part in stored.parts.items()), *((one.region, None) for one in stored.plain)]
    for number, (region, quantized) in enumerate(regions):
        held = region if isinstance(region, FlatRange) else flat_range(region, stored.shape)
        if held is None:
            return None
        found.append(_Piece(number, held.start, held.stop, quantized))
    return sorted(found, key=lambda one: one.start)


def _kind_of_part(part: Quantized | None) -> Any:
    return part and (part.method, part.num_bits, part.block_size, part.values and _read_values(part.values))


def _read_values(extent: Extent) -> bytes:
    with opened(extent.path) as descriptor:
        return read_at(descriptor, extent.path, extent.offset, extent.nbytes)


def _from(key: Key, name: str, one: _Piece, whole: FlatRange, per: int) -> FromSource:
    """Return the overlap of `whole` with a piece, with `per` state elements per stored element."""
    low, high = max(one.start, whole.start), min(one.stop, whole.stop)
    region = FlatRange((low - one.start) // per, -(-(high - one.start) // per))
    return FromSource(_part_key(key, name, one.number), region, (low - whole.start) // per)


def _put_together(key: Key, like: Quantized, held: list[_Piece], whole: FlatRange, sizes: Shape) -> Record | Blocks:
    numel, per_byte = prod(sizes), 8 // like.num_bits
    shape = sizes if per_byte == 1 else (numel // per_byte,)
    codes = NewTensor(like.codes.dtype, shape, tuple(_from(key, "codes", one, whole, per_byte) for one in held))
    factors: tuple[Part, ...] = tuple(_from(key, "factors", one, whole, like.block_size) for one in held)
    scale = NewTensor(FLOAT32, (-(-numel // like.block_size),), factors)
    values = like.values and NewTensor(FLOAT32, like.values.shape, (Bytes(_read_values(like.values)),))
    if like.record is None:
        assert values is not None
        return Blocks(codes, scale, values)
    if numel % like.block_size:
        raise _refused(
            key,
            f"its part on a rank is not a multiple of torchao's block, {pluralize(like.block_size, 'element')}",
        )
    made: dict[str, Any] = {"codes": codes, "scale": scale, "qmap": values, "_shape": Size(sizes)}
    state = {name: made.get(name, value) for name, value in like.record.attributes.items()}
    for name, value in state.items():
        if name not in made and type(value) not in (int, bool):
            raise _refused(key, f"torchao stores an unknown {name} with it")
    return wrapper(like.record.module, like.record.name, FLOAT32, sizes, state)


def _refused(key: Key, why: str) -> LossError:
    return LossError(
        "a quantized optimizer state's blocks cannot be copied to the target",
        fqn=key[0],
        found=f"{key[1]}: {why}",
        hint=_HINT,
    )
