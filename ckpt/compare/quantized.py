"""Comparison of a quantized checkpoint with the plain one: rounding errors, and equality of everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt.base.errors import shown
from ckpt.base.text import aligned, one_line, pluralize
from ckpt.compare.compare import Reader
from ckpt.compare.pairs import (
    DIFFERENT,
    EQUAL,
    UNREADABLE,
    Only,
    Progress,
    Report,
    Result,
    bitwise,
    differing_dtypes,
    more_lines,
    result_line,
    walk,
)
from ckpt.compare.rounding import rounding_error
from ckpt.move.casts import FLOATS
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.protocols import RoundedWeightProtocol
from ckpt.plan.tensors import Tensor

_WORST = 10
_HEADS = ("worst weights", "method", "largest", "mean", "beyond", "largest at")
_UNITS = "errors are in units of the scale"
_SHOWN = 20


@dataclass(frozen=True, repr=False)
class QuantizedReport(Report):
    """Rounding errors of quantized weights in units of their scales, and equality of all other tensors."""

    verdict: ClassVar[str] = ".within_bound"

    def __repr__(self) -> str:
        return f"<{shown(self.a.path)} and {shown(self.b.path)}: {self.outcome}>"

    @property
    def within_bound(self) -> bool:
        """True if every quantized weight is within its method's bound, and every other tensor is equal."""
        return bool(self.rounded) and all(result.status == EQUAL for result in self.results)

    @property
    def exit_code(self) -> int:
        """0: within the bound, 1: beyond it, or different. If a tensor could not be read, the first error's code."""
        unreadable = (one.exit_code for one in self.results if one.status == UNREADABLE)
        return next(unreadable, int(not self.within_bound))

    @property
    def rounded(self) -> tuple[Result, ...]:
        """Quantized weights: those beyond the bound first, then by descending error."""
        found = [one for one in self.results if one.rounding is not None]
        return tuple(sorted(found, key=_badness))

    def to_json(self) -> dict[str, Any]:
        worst = [one_line(one.fqn) for one in self.rounded[:_WORST]]
        found = {name: value for name, value in super().to_json().items() if name != "equal"}
        return {"within_bound": self.within_bound, "worst": worst, **found}

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """Yield the worst weights (with `verbose` all), other tensors that differ, and the outcome."""
        rounded = self.rounded if verbose else self.rounded[:_WORST]
        if rounded:
            yield from (*aligned(_HEADS, list(map(_weight_row, rounded)), _HEADS[2:5]), _UNITS, "")
        others = [one for one in self.results if one.status != EQUAL and one.rounding is None]
        listed = others if verbose else others[:_SHOWN]
        yield from (result_line(one, self.a, self.b) for one in listed)
        yield from more_lines(len(others) - len(listed))
        yield from map(str, self.not_compared)
        yield from (f"note: {one_line(note)}" for note in self.notes)
        yield self.outcome

    @property
    def outcome(self) -> str:
        weights = pluralize(len(self.rounded), "quantized weight")
        others = [one for one in self.results if one.rounding is None]
        if self.within_bound:
            equal = f", {pluralize(len(others), 'other tensor')} equal" if others else ""
            return f"within the bound: {weights}{equal}"
        beyond = sum(one.status != EQUAL and not _is_unbounded(one) for one in self.rounded)
        unbounded = sum(map(_is_unbounded, self.rounded))
        unequal = sum(one.status != EQUAL for one in others)
        counts = {
            f"{beyond} of {weights} beyond": beyond,
            f"{pluralize(unbounded, 'weight')} without a bound": unbounded,
            f"{pluralize(unequal, 'other tensor')} different": unequal,
        }
        found = ", ".join(text for text, count in counts.items() if count)
        return f"not within the bound: {found or 'no quantized weight was compared'}"


def verify_quantized(
    a: Checkpoint,
    b: Checkpoint,
    weights: Mapping[str, RoundedWeightProtocol],
    is_b: bool,
    *,
    only: Only = "all",
    cast: bool = False,
    exact: bool = False,
    progress: Progress | None = None,
    expected: Progress | None = None,
) -> QuantizedReport:
    """Compare a dequantized checkpoint with the plain one, by name.

    `weights` are the quantized weights of B if `is_b`, else of A. All other tensors must be equal.
    """
    judge, plain = bitwise(a, b, cast=cast, exact=exact), a if is_b else b

    def measure(x: Tensor, y: Tensor, reader: Reader) -> Result:
        rounded, other = (y, x) if is_b else (x, y)
        if (weight := weights.get(rounded.fqn)) is None:
            return judge(x, y, reader)
        if other.dtype not in FLOATS:
            return differing_dtypes(x, y)
        error = rounding_error(weight, other, plain.computed)
        reader.advance(x.nbytes)
        kind = "unbounded" if error.unbounded else "beyond" if error.num_beyond else "rounded"
        status = EQUAL if kind == "rounded" else DIFFERENT
        return Result(status, kind, x.fqn, x.role, y.fqn, y.role, nbytes=x.nbytes, rounding=error)

    return QuantizedReport(a, b, *walk(a, b, only, measure, progress, expected))


def _is_unbounded(result: Result) -> bool:
    return result.rounding is not None and bool(result.rounding.unbounded)


def _badness(result: Result) -> tuple[bool, float]:
    assert result.rounding is not None
    return result.status == EQUAL, -result.rounding.largest


def _weight_row(result: Result) -> tuple[str, ...]:
    error = result.rounding
    assert error is not None
    beyond = "no bound" if error.unbounded else str(error.num_beyond)
    numbers = f"{error.largest:.3g}", f"{error.mean:.3g}"
    return one_line(result.fqn), error.method, *numbers, beyond, str(list(error.index))
