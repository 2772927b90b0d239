"""Quantized weight: its stored tensors, and the computation of its plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import CorruptError, UsageError
from ckpt.base.text import pluralize
from ckpt.move.casts import cast_bits
from ckpt.move.reading import read_box
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import BFLOAT16, CASTABLE, FLOAT32, DType
from ckpt.plan.model_config import config_parts
from ckpt.plan.tensors import Box, Region, Shape, Tensor, whole
from converters.names.transformers.modules import describe, has_conv1d

#: Models with transformers' Conv1D linear layers, for use without transformers.
_CONV1D_MODELS = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Region in a plain tensor, with a function that computes its elements in row-major order.

    If `transposed`, the elements are in the transposed matrix's order.
    """

    region: Region
    content: Callable[[], memoryview]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """Quantized weight: its plain name, dtype and shape, the names of its `parts`, and blocks that tile it.

    `unused` parts do not affect the weight, for example activation scales.
    """

    fqn: str
    method: str
    dtype: DType
    shape: Shape
    parts: tuple[str, ...]
    blocks: tuple[WeightBlock, ...]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredWeights:
    """Tensors to search for quantized weights.

    `quantization` is the config's `quantization_config`; `dtype` is the target dtype.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    quantization: Mapping[str, Any]
    dtype: DType

    def read(self, fqn: str, box: Box | None = None) -> NDArray:
        """Return raw bits from a tensor, or from a box in it."""
        tensor = self.tensors[fqn]
        return read_box(tensor, whole(tensor.shape) if box is None else box, self.checkpoint.computed)

    def part(self, fqn: str, of: str) -> Tensor:
        """Return a required part for the quantized weight `of`. Raise CorruptError if it is missing."""
        tensor = self.tensors.get(fqn)
        if tensor is None:
            raise CorruptError(
                "a part is missing for a quantized weight", path=self.checkpoint.path, fqn=of, expected=fqn
            )
        return tensor

    def scales(self, fqn: str, box: Box | None = None) -> NDArray:
        """Return a floating-point scale's values in fp32, flat. Raise CorruptError for NaN or infinity."""
        bits = cast_bits(self.read(fqn, box).reshape(-1), self.tensors[fqn].dtype, FLOAT32)
        values = bits.view(np.float32).reshape(-1)
        self.check_finite(fqn, np.isfinite(values), box)
        return values

    def check_finite(self, fqn: str, is_finite: NDArray, box: Box | None = None) -> None:
        """Raise CorruptError for the first scale that is not finite. `box` is the part read from the tensor."""
        if is_finite.all():
            return
        box = whole(self.tensors[fqn].shape) if box is None else box
        inner = np.unravel_index(int(np.argmin(is_finite)), box.sizes) if box.sizes else ()
        index = [int(offset) + int(i) for offset, i in zip(box.offsets, inner, strict=True)]
        raise CorruptError(
            "a quantized weight has a NaN or infinite scale, so the plain weight would be too",
            path=self.checkpoint.path,
            fqn=fqn,
            expected="finite scales",
            found=f"element {index}; {pluralize(int((~is_finite).sum()), 'such scale')} in the part read here",
            hint="use `ckpt check --values` to find all of them; download or copy the folder again",
        )

    @cached_property
    def conv1d(self) -> frozenset[str]:
        """Conv1D modules from transformers, whose weight is [in, out]."""
        config = self.checkpoint.config
        known = has_conv1d(config)
        if known is None and (config or {}).get("model_type") not in _CONV1D_MODELS:
            known = False
        if known is False:
            return frozenset()
        modules = describe(config, {fqn: tensor.shape for fqn, tensor in self.tensors.items()}, None)
        if modules is None:
            raise UsageError(
                "some layers may store transposed weights, and only the model's class can tell",
                path=self.checkpoint.path,
                hint="pip install 'transformers>=5' torch",
            )
        return frozenset(name for name, module in modules.items() if module.is_conv1d)

    def corrupt(self, fqn: str, expected: object, found: object) -> CorruptError:
        return CorruptError(
            "a part is wrong in a quantized weight",
            path=self.checkpoint.path,
            fqn=fqn,
            expected=expected,
            found=found,
        )


def model_dtype(config: Mapping[str, Any] | None) -> DType:
    """Return the dtype in the model's config, or bfloat16, the usual dtype for loading quantized models."""
    for part in config_parts(config):
        name = str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch.")
        for dtype in CASTABLE.values():
            if dtype.name == name:
                return dtype
    return BFLOAT16


def rounded(values: NDArray, *dtypes: DType) -> memoryview:
    """Round fp32 `values` to each dtype in turn, and return the bytes in the last one."""
    bits, now = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32), FLOAT32
    for dtype in dtypes:
        if dtype != now:
            bits, now = cast_bits(bits, now, dtype), dtype
    return bits.view(np.uint8).data
