"""Roundings to small floats: their values in order, and the bytes for 1.0."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from converters.quantized.floats import e2m1_values, e4m3_values
from converters.quantized.scheme import EPSILON, Rounding


@cache
def e2m1_grid() -> tuple[float, ...]:
    return _in_order(e2m1_values())


@cache
def e4m3_grid() -> tuple[float, ...]:
    return _in_order(e4m3_values()[np.isfinite(e4m3_values())])


def e2m1_rounding(packed: str, scale: str, epsilon: float = EPSILON) -> Rounding:
    return Rounding(scale, ((packed, 0x22),), e2m1_grid(), epsilon=epsilon)


def e4m3_rounding(packed: str, scale: str, epsilon: float = EPSILON) -> Rounding:
    return Rounding(scale, ((packed, 0x38),), e4m3_grid(), epsilon=epsilon)


def _in_order(values: NDArray) -> tuple[float, ...]:
    """Avoid `np.unique`: it imports numpy.ma."""
    return tuple(sorted({*values.tolist()}))
