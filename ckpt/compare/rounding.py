"""Rounding error of one quantized weight, measured in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from ckpt.base.text import one_line, pluralize
from ckpt.move.reading import Computed
from ckpt.plan.planner import first_index
from ckpt.plan.protocols import RoundedWeightProtocol
from ckpt.plan.tensors import Shape, Tensor


@dataclass(frozen=True, slots=True)
class RoundingError:
    """Distance between a quantized weight and the plain one, in units of the scale.

    `largest` is infinite if a number is not finite, or not zero under a zero scale. `index` is its position.
    `num_beyond` counts the elements beyond the method's bound. `unbounded` is the reason why there is no bound.
    """

    method: str
    numel: int
    largest: float
    mean: float
    index: Shape
    num_beyond: int
    unbounded: str = ""

    def __str__(self) -> str:
        text = f"largest error {self.largest:.3g} at {list(self.index)}, mean {self.mean:.3g}, in units of the scale"
        if self.unbounded:
            return f"{text}; no bound: {self.unbounded}"
        return f"{text}; {self.num_beyond} of {pluralize(self.numel, 'element')} beyond the bound of {self.method}"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": one_line(self.method),
            "largest": self.largest if isfinite(self.largest) else str(self.largest),
            "mean": self.mean if isfinite(self.mean) else str(self.mean),
            "index": list(self.index),
            "num_beyond": None if self.unbounded else self.num_beyond,
            "numel": self.numel,
            "unbounded": self.unbounded or None,
        }


def rounding_error(weight: RoundedWeightProtocol, plain: Tensor, computed: Computed) -> RoundingError:
    largest, total, index, num_beyond = -1.0, 0.0, (0,) * len(plain.shape), 0
    for region, start, errors, is_beyond in weight.errors(plain, computed):
        position = int(np.argmax(errors))
        if errors[position] > largest:
            largest, index = float(errors[position]), first_index(region, plain.shape, start + position)
        total += float(errors.sum())
        num_beyond += int(np.count_nonzero(is_beyond))
    mean = total / max(1, plain.numel)
    return RoundingError(weight.method, plain.numel, max(0.0, largest), mean, index, num_beyond, weight.unbounded)
