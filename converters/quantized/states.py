"""Quantized optimizer states.

Sources: torchao 0.18 `optim/subclass_8bit.py`, `subclass_4bit.py`, `subclass_fp8.py` and `quant_utils.py`
(`dequant_with_qmap`); bitsandbytes 0.50.2 `optim/optimizer.py` (`state_dict`, `Optimizer2State.init_state`) and
`backends/default/ops.py` (`dequantize_blockwise`).

torchao has a tensor subclass with `codes`, `scale` (one per block) and, except for fp8, `qmap`, the codes' values. In 4
bits, two codes share a byte, the first in the upper half, and the codes are flat. Blocks have equal sizes.

bitsandbytes has separate plain tensors: `state1`, uint8, with `qmap1` and `absmax1`, and `state2` likewise. The last
block may be shorter. Since 0.49 its `state_dict()` puts them, and everything else but numbers, into a separate dict,
`__bnb_optimizer_quant_state__`.

Blocks count from the start of a rank's optimizer tensor: a parameter, its shard (FSDP), or a flat buffer of many
parameters (ZeRO). A value is its code's value times its block's factor, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.dtypes import BY_NAME, FLOAT32
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Rule, Run, Shape, flat_regions, run_fragments
from converters.quantized.blocks import BLOCK, spans

NESTED = "__bnb_optimizer_quant_state__"

_UINT8, _E4M3 = BY_NAME["uint8"], BY_NAME["float8_e4m3fn"]
_TORCHAO = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
#: bitsandbytes' block sizes: since 0.39, and before.
_BLOCK_SIZES = (256, 2048)
_NUM_CODES = 256
_GATHERED = "AsyncCollectiveTensor"

Computed = dict[str, Callable[[], memoryview]]


@dataclass(frozen=True, slots=True)
class Quantized:
    """State in blocks of `block_size` elements.

    `codes` has one code per element, or two per byte if `num_bits` is 4. `values` has one value per code (None: the
    codes are numbers themselves).
    """

    method: str
    shape: Shape
    num_bits: int
    block_size: int
    codes: Extent
    factors: Extent
    values: Extent | None
    record: Record | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def path(self) -> str:
        """Made-up path for the plain values."""
        return f"dequantized:{self.codes.path}:{self.codes.offset}"

    @property
    def extent(self) -> Extent:
        """Extent of all plain values. Cut it into `blocks` before reading."""
        return Extent.contiguous(self.path, 0, FLOAT32, self.shape)

    def blocks(self) -> Computed:
        return {
            f"{self.path}:{number}": partial(self.compute, start, stop)
            for number, (start, stop) in enumerate(spans(self.numel, BLOCK))
        }

    def compute(self, start: int, stop: int) -> memoryview:
        """Compute fp32 bytes. `start` must be a block's start."""
        from converters.quantized.plain_states import compute  # needs numpy

        return compute(self.codes, self.factors, self.values, self.num_bits, self.block_size, start, stop)


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter's state in quantized and in fp32 boxes."""

    shape: Shape
    parts: Mapping[Box, Quantized]
    plain: tuple[Fragment, ...]


# -- values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InBlocks:
    """Rule that replaces quantized extents by computed blocks."""

    rule: Rule
    quantized: frozenset[str]

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        return run_fragments(self.runs(shape, 0, prod(shape)))

    def runs(self, shape: Shape, start: int, stop: int) -> list[Run]:
        found: list[Run] = []
        for first, last, extent, at, rank in self.rule.runs(shape, start, stop) or ():
            if extent.path not in self.quantized:
                found.append((first, last, extent, at, rank))
                continue
            while first < last:
                number, inner = divmod(at, BLOCK)
                size = min(BLOCK - inner, last - first)
                found.append((first, first + size, _block(extent, number), inner, rank))
                first, at = first + size, at + size
        return found


def _block(extent: Extent, number: int) -> Extent:
    numel = min(BLOCK, extent.numel - number * BLOCK)
    return Extent.contiguous(f"{extent.path}:{number}", 0, FLOAT32, (numel,))


def pieces(parts: Mapping[Box, Quantized], shape: Shape) -> Pieces:
    found = []
    for box, one in parts.items():
        flat = one.extent.reshape((one.numel,))
        for number, (start, stop) in enumerate(spans(one.numel, BLOCK)):
            block = _block(flat, number)
            for region, at in flat_regions((box,), shape, start, stop):
                found.append(Fragment(region, block.holding(region, at - start)))
    return Pieces(tuple(found))


# -- parsing ------------------------------------------------------------------------------------------------------


def understood(states: Mapping[str, Any]) -> dict[str, Any]:
    """Parse quantized states. Unknown forms stay unchanged."""
    nested = states.get(NESTED)
    flat = {name: value for name, value in states.items() if name != NESTED or not isinstance(nested, Mapping)}
    if isinstance(nested, Mapping):
        flat |= {str(name): value for name, value in nested.items()}
    for name in [name for name in flat if name.startswith("absmax")]:
        number = name.removeprefix("absmax")
        one = _bitsandbytes(flat.get(f"state{number}"), flat.get(f"qmap{number}"), flat[name])
        if one is not None:
            flat[f"state{number}"] = one
            del flat[name], flat[f"qmap{number}"]
    return {name: torchao(value) or value for name, value in flat.items()}


def torchao(value: Any) -> Quantized | None:
    kind = kind_of(value)
    if kind is None:
        return None
    codes, factors, values = (_extent(value.get(name)) for name in ("codes", "scale", "qmap"))
    num_bits = 4 if value.name == "OptimState4bit" else 8
    dtype, num_codes = (_E4M3, None) if value.name == "OptimStateFp8" else (_UINT8, 1 << num_bits)
    if codes is None or factors is None or codes.dtype != dtype:
        return None
    shape = value.get("_shape") if num_bits == 4 else codes.shape
    if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        return None
    size = prod(shape)
    if not size or not factors.numel or size % factors.numel or codes.numel * (8 // num_bits) != size:
        return None
    found = Quantized(kind, shape, num_bits, size // factors.numel, codes, factors, values, value)
    return _checked(found, num_codes)


def kind_of(value: Any) -> str | None:
    """Return a torchao state's class, even if its parts are unknown."""
    if isinstance(value, Record) and value.module.startswith("torchao.") and value.name in _TORCHAO:
        return f"torchao {value.name}"
    return None


def check_place(state: Quantized, box: Box, path: str | Path, fqn: str, name: str) -> None:
    if state.shape != box.sizes:
        raise CorruptError(
            f"the quantized {name} has the wrong shape",
            path=path,
            fqn=fqn,
            expected=f"shape {list(box.sizes)}",
            found=f"shape {list(state.shape)}",
        )


def _bitsandbytes(codes: Any, values: Any, factors: Any) -> Quantized | None:
    stored, table, absmax = _extent(codes), _extent(values), _extent(factors)
    if stored is None or table is None or absmax is None or stored.dtype != _UINT8:
        return None
    for size in _BLOCK_SIZES:
        if -(-stored.numel // size) == absmax.numel:
            return _checked(Quantized("bitsandbytes", stored.shape, 8, size, stored, absmax, table), _NUM_CODES)
    return None


def is_unfinished(value: Any) -> bool:
    """Return True if FSDP2 wrote a state before gathering its parts: then the file may hold anything.

    torch 2.13, `distributed/_state_dict_utils.py`: it waits for plain tensors, but not for tensors inside a subclass.
    """
    if not isinstance(value, Record):
        return False
    parts = [part for part in value.attributes.values() if isinstance(part, Record) and part.name == _GATHERED]
    return any(part.get("completed") is not True for part in parts)


def _extent(value: Any) -> Extent | None:
    if isinstance(value, Record) and value.name == _GATHERED and value.get("completed") is True:
        value = value.get("elem")
    return value.extent if isinstance(value, StoredTensor) and value.extent.is_contiguous else None


def _checked(found: Quantized, num_codes: int | None) -> Quantized | None:
    """Return None if a part has the wrong dtype or size."""
    factors, values = found.factors, found.values
    if factors.dtype != FLOAT32 or len(factors.shape) != 1 or BLOCK % found.block_size:
        return None
    if num_codes is None:
        return replace(found, values=None)
    return found if values is not None and (values.dtype, values.shape) == (FLOAT32, (num_codes,)) else None
