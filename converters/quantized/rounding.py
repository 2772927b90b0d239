"""Rounding errors of quantized weights, and their bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.move.reading import Computed, read_box
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32, DType
from ckpt.plan.tensors import Box, Region, Tensor, flat_boxes, whole
from converters.quantized._weight import E4M3, StoredWeights, WeightBlock
from converters.quantized.blocks import spans
from converters.quantized.dequantize import check_parts_known, plain_weight
from converters.quantized.parts import QuantizedWeights, quantized_weights
from converters.quantized.scheme import Rounding

_STEP = 1 << 18  # elements measured at a time
_E4M3_ONE = 0x38
#: Largest relative error of a rounded number, by dtype.
_EPSILONS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class _FilledWeights(StoredWeights):
    fills: Mapping[str, int]

    def read(self, fqn: str, box: Box | None = None) -> NDArray:
        if fqn not in self.fills:
            return super().read(fqn, box)
        tensor = self.tensors[fqn]
        box = whole(tensor.shape) if box is None else box
        content = np.full(box.numel * tensor.dtype.itemsize, self.fills[fqn], np.uint8)
        return content.view(storage_dtype(tensor.dtype)).reshape(box.sizes)


@dataclass(frozen=True, slots=True)
class _RoundedBlock:
    """Plain values, scales, and scales with 1.0 as stored e4m3 numbers."""

    values: WeightBlock
    scales: WeightBlock
    rest: WeightBlock


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """Quantized weight. `unbounded` says why no bound holds."""

    method: str
    rounding: Rounding
    scale_dtype: DType
    blocks: tuple[_RoundedBlock, ...]
    parts: tuple[str, ...]

    @property
    def unbounded(self) -> str:
        return self.rounding.unbounded

    def errors(self, plain: Tensor, computed: Computed) -> Iterator[tuple[Region, int, NDArray, NDArray]]:
        """Yield errors in units of the scale, and True for each error beyond the bound.

        They belong to a region's elements from a position on, in row-major order.
        """
        names = plain.dtype.name, self.scale_dtype.name
        epsilons, is_fp16 = (_EPSILONS.get(name, 0.0) for name in names), "float16" in names
        of_master = 2.0**-7 if plain.role == MASTER else 0.0  # it was rounded to 16 bits first
        least = max(self.rounding.epsilon, of_master, *epsilons)
        for block in self.blocks:
            region = block.values.region
            if not region.numel:
                continue
            values, scales = _block_values(block.values), _block_values(block.scales)
            rest = float(_block_values(block.rest)[0]) if self.scale_dtype == E4M3 else None  # the global scale
            bits = _read_region(plain, region, computed)
            for start, stop in spans(len(bits), _STEP):
                x = cast_bits(bits[start:stop], plain.dtype, FLOAT32).view(np.float32)
                yield region, start, *self._measure(x, values[start:stop], scales[start:stop], rest, least, is_fp16)

    def _measure(
        self, x: NDArray, rounded: NDArray, scales: NDArray, rest: float | None, least: float, is_fp16: bool
    ) -> tuple[NDArray, NDArray]:
        is_empty = scales == 0
        x, rounded, scales = (one.astype(np.float64) for one in (x, rounded, np.where(is_empty, 1, scales)))
        epsilon: NDArray | float = least
        if is_fp16:  # small scales have fewer bits
            epsilon = np.maximum(least, 2.0**-25 / np.abs(scales))
        with np.errstate(all="ignore"):
            number, stored = x / scales, rounded / scales
            if self.rounding.values:
                values, steps = _values_and_steps(self.rounding.values)
                index = np.searchsorted(steps, stored)
                error = np.abs(number - values[index])
                beyond_end = self._beyond_end(scales, rest, epsilon)
                low = np.where(index == 0, values[0] * beyond_end, steps[index - 1])
                high = np.where(index == len(steps), values[-1] * beyond_end, steps[np.minimum(index, len(steps) - 1)])
                slack = np.abs(number) * epsilon
                is_within = (number >= low - slack) & (number <= high + slack)
            else:
                error = np.abs(number - np.rint(stored))
                is_within = error <= 0.5 + self.rounding.span * epsilon
        error = np.where(is_empty, np.where(x == 0, 0.0, np.inf), np.where(np.isnan(error), np.inf, error))
        return error, ~np.where(is_empty, x == 0, is_within & np.isfinite(number))

    def _beyond_end(self, scales: NDArray, rest: float | None, epsilon: NDArray | float) -> NDArray | float:
        """Return the largest number cut to the last value, relative to it: writers round scales, down too."""
        if rest is not None:  # e4m3 has 3 bits of fraction, and steps of 2 ** -9 at least
            number = np.abs(scales / rest)
            exponent = np.floor(np.log2(number * 1.02))  # the product may be rounded, and a little too small
            steps: NDArray = np.maximum(np.exp2(exponent - 4), 2.0**-10)
            ends: NDArray = 1.0 + steps / number
            return ends
        if self.scale_dtype.name in _EPSILONS:
            return 1 + epsilon
        end = self.rounding.values[-1]  # a power of two: OCP's rule takes the exponent of the largest number
        return float(2.0 ** (np.floor(np.log2(end)) + 1) / end)


@cache
def _values_and_steps(values: tuple[float, ...]) -> tuple[NDArray, NDArray]:
    """Return the values, and the numbers halfway between neighbors."""
    grid = np.array(values, np.float64)
    return grid, (grid[1:] + grid[:-1]) / 2


def _block_values(block: WeightBlock) -> NDArray:
    """Return fp32 values in the region's row-major order."""
    values = np.frombuffer(block.content(), np.float32)
    if block.transposed and isinstance(block.region, Box):
        values = values.reshape(block.region.sizes[::-1]).T.reshape(-1)
    return values


def _read_region(tensor: Tensor, region: Region, computed: Computed) -> NDArray:
    boxes = [region] if isinstance(region, Box) else [*flat_boxes(tensor.shape, region.start, region.stop)]
    return np.concatenate([read_box(tensor, box, computed).reshape(-1) for box in boxes])


def rounded_weights(checkpoint: Checkpoint) -> Mapping[str, RoundedWeight]:
    """Raise the errors of `dequantized`."""
    tensors = {fqn: tensor for (fqn, role), tensor in checkpoint.tensors.items() if role in (WEIGHT, BUFFER)}
    quantized = quantized_weights(checkpoint)
    check_parts_known(checkpoint, quantized)
    stored = StoredWeights(checkpoint, tensors, FLOAT32)
    weights = {owner: plain_weight(stored, quantized, owner) for owner in quantized.owners}
    roundings = {owner: _declared_rounding(stored, quantized, owner) for owner in weights}
    units: dict[str, int] = {}
    ones: dict[str, int] = {}
    for owner, rounding in roundings.items():
        parts = quantized.owners[owner]
        units |= {parts[template]: byte for template, byte in rounding.unit if template in parts}
        if stored.tensors[parts[rounding.scale]].dtype == E4M3:
            ones[parts[rounding.scale]] = _E4M3_ONE
    sources = [_FilledWeights(checkpoint, tensors, FLOAT32, fills) for fills in (units, {**units, **ones})]
    found = {}
    for owner, rounding in roundings.items():
        values, (scales, rest) = weights[owner], (plain_weight(source, quantized, owner) for source in sources)
        blocks = tuple(map(_RoundedBlock, values.blocks, scales.blocks, rest.blocks))
        scale = stored.tensors[quantized.owners[owner][rounding.scale]].dtype
        found[owner] = RoundedWeight(values.method, rounding, scale, blocks, values.parts)
    return found


def rounded_blocks(checkpoint: Checkpoint) -> Mapping[str, RoundedWeight]:
    found = {}
    for fqn, stored in checkpoint.blocks.items():
        assert stored.scales is not None
        pairs = zip(checkpoint.tensors[fqn, WEIGHT].fragments(), stored.scales.fragments(), strict=True)
        content = checkpoint.computed
        blocks = tuple(
            _RoundedBlock(*(WeightBlock(one.region, content[one.extent.path]) for one in (values, scales, scales)))
            for values, scales in pairs
        )
        rounding = Rounding("", (), stored.values, stored.span)
        found[fqn] = RoundedWeight(stored.type, rounding, stored.scale_dtype, blocks, ())
    return found


def _declared_rounding(stored: StoredWeights, quantized: QuantizedWeights, owner: str) -> Rounding:
    """Raise UsageError unless schemes declare one rounding."""
    declared = dict.fromkeys(scheme.rounding for scheme in quantized.schemes[owner] if scheme.rounding)
    if len(declared) != 1:
        raise stored.unsupported(owner, found=f"{quantized.title}, whose rounding is not declared")
    return next(iter(declared))
