"""Distance between two tensors: relative error, cosine, largest change.

Sums are float64. NaN and infinity are counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.compare.compare import Reader, blocks, check_covered, numbers
from ckpt.plan.dtypes import DType
from ckpt.plan.planner import first_index
from ckpt.plan.tensors import Fragment, Shape, overlay

_STEP = 1 << 15  # elements measured at a time: as float64 they fit the processor's cache


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed distance: `atol + rtol * abs(a)`, like in numpy and torch."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Distance from A to B for one tensor or several.

    `num_changed` counts elements with other bits, or with another number or sign if the dtypes differ. `num_beyond`
    counts numbers beyond the tolerance, `not_finite` NaN and infinity in A and in B. `squares` are the sums of squares
    for A, B and B - A, `product` is the dot product of A and B. `largest` is the largest absolute difference, or None
    if numpy cannot decode the dtype. `index` is its position.
    """

    numel: int = 0
    num_changed: int = 0
    num_beyond: int = 0
    not_finite: tuple[int, int] = (0, 0)
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    product: float = 0.0
    largest: float | None = None
    index: Shape = ()

    @property
    def relative(self) -> float | None:
        """Norm of B - A relative to A's norm. None if nothing was measured, or if only A is zero."""
        of_a, _, between = self.squares
        if self.largest is None or not isfinite(of_a + between):
            return None
        return sqrt(between / of_a) if of_a else None if between else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine between A and B. None if one is zero, or nothing was measured."""
        norms = sqrt(self.squares[0]) * sqrt(self.squares[1])
        if self.largest is None or not norms or not isfinite(norms):
            return None
        return max(-1.0, min(1.0, self.product / norms))

    def to_json(self) -> dict[str, Any]:
        return {
            "numel": self.numel,
            "num_changed": self.num_changed,
            "num_beyond": self.num_beyond,
            "not_finite": list(self.not_finite),
            "relative": self.relative,
            "cosine": self.cosine,
            "largest": self.largest if self.largest is None or isfinite(self.largest) else str(self.largest),
            "index": list(self.index),
        }


def together(changes: Iterable[Change]) -> Change:
    every = list(changes)
    measured = (one for one in every if one.largest is not None)
    most = max(measured, key=lambda one: one.largest or 0.0, default=Change())
    a, b, between = (sum(one.squares[side] for one in every) for side in range(3))
    return Change(
        sum(one.numel for one in every),
        sum(one.num_changed for one in every),
        sum(one.num_beyond for one in every),
        (sum(one.not_finite[0] for one in every), sum(one.not_finite[1] for one in every)),
        (a, b, between),
        sum(one.product for one in every),
        most.largest,
        most.index,
    )


def measure(
    shape: Shape,
    a: Iterable[Fragment],
    b: Iterable[Fragment],
    reader: Reader,
    allowed: Tolerance = Tolerance(),
    advance: Callable[[int], None] = lambda _: None,
) -> Change:
    """Measure the distance from fragments `a` to fragments `b`, in any dtypes.

    If numpy cannot decode a dtype, only the elements with different bits are counted. Raise CorruptError if the
    fragments do not cover the shape, or a file ends too early.
    """
    found = Change()
    for common in overlay(a, b, shape):
        for region, start, one, other in blocks(common):
            x, y = reader.gather(0, one).reshape(-1), reader.gather(1, other).reshape(-1)
            for at in range(0, len(x), _STEP):
                part = slice(at, at + _STEP)
                change = _block_change(x[part], one.dtype, y[part], other.dtype, allowed)
                if change.index:
                    change = replace(change, index=first_index(region, shape, start + at + change.index[0]))
                found = together((found, change))
            advance(one.nbytes)
    check_covered(found.numel, shape)
    return found


def can_measure(a: DType, b: DType) -> bool:
    return a == b or all(numbers(np.zeros(dtype.itemsize, np.uint8), dtype) is not None for dtype in (a, b))


def _block_change(a: NDArray, a_dtype: DType, b: NDArray, b_dtype: DType, allowed: Tolerance) -> Change:
    num_different = int(np.count_nonzero(a != b)) if a_dtype == b_dtype else None
    is_same = num_different == 0
    x = numbers(a, a_dtype)
    y = x if is_same else numbers(b, b_dtype)
    if x is None or y is None:
        return Change(len(a), num_different or 0, num_different or 0)
    # Different integers beyond 2**53 may be equal as float64.
    apart = x != y if x.dtype.kind in "iu" and y.dtype.kind in "iu" and not is_same else None
    x, y = (one if one.dtype.kind == "c" else one.astype(np.float64, copy=False) for one in (x, y))
    if num_different is None:
        num_different = int(np.count_nonzero(_differ(x, y) if apart is None else apart))
    with np.errstate(over="ignore", invalid="ignore"):
        squares, num_odd, odd = (_square(x), _square(y)), 0, (0, 0)
        if not isfinite(sum(squares)):
            x, y, num_odd, odd = _finite(x, y)
            squares = _square(x), _square(y)
        if is_same:
            return Change(len(x), 0, 0, odd, (*squares, 0.0), squares[0], 0.0)
        size = np.abs(y - x) if apart is None else np.maximum(np.abs(y - x), apart)
        place = int(size.argmax())
        num_beyond = np.count_nonzero(size > allowed.atol + allowed.rtol * np.abs(x))
        return Change(
            len(x),
            num_different,
            int(num_beyond) + num_odd,
            odd,
            (*squares, _square(size)),
            float(np.vdot(x, y).real),
            float(size[place]),
            (place,),
        )


def _differ(x: NDArray, y: NDArray) -> NDArray:
    """Compare values and signs of zero. Two NaN are equal."""
    different: NDArray = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if x.dtype.kind == "f" and y.dtype.kind == "f":
        different |= (x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))
    return different


def _square(x: NDArray) -> float:
    return float(np.vdot(x, x).real)


def _finite(x: NDArray, y: NDArray) -> tuple[NDArray, NDArray, int, tuple[int, int]]:
    """Return both with 0 for NaN and infinity, and their numbers: differing ones, and per side."""
    odd_x, odd_y = ~np.isfinite(x), ~np.isfinite(y)
    odd = odd_x | odd_y
    num_different = int(np.count_nonzero(odd & (x != y) & ~(np.isnan(x) & np.isnan(y))))
    counts = int(np.count_nonzero(odd_x)), int(np.count_nonzero(odd_y))
    return np.where(odd, 0, x), np.where(odd, 0, y), num_different, counts
