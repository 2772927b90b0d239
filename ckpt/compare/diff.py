"""Changes between two checkpoints in numbers: by tensor, by layer, and against tolerances."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from ckpt.base.errors import UsageError, shown
from ckpt.base.text import aligned, one_line, pluralize, show_size
from ckpt.base.words import Keyword, Message
from ckpt.compare.changes import Change, Tolerance, can_measure, measure, together
from ckpt.compare.compare import Reader
from ckpt.compare.pairs import (
    DIFFERENT,
    EQUAL,
    UNREADABLE,
    Only,
    Progress,
    Report,
    Result,
    differing_dtypes,
    more_lines,
    result_line,
    walk,
)
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, WEIGHT, Checkpoint
from ckpt.plan.tensors import Tensor

HEADS = ("changed", "relative", "cosine", "largest")
_SHOWN = 20  # tensors listed without `verbose`
_LAYER = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True, repr=False)
class Diff(Report):
    """Changes from `a` to `b`. `tolerance` is None if not given."""

    verdict: ClassVar[str] = ".equal or .within"

    tolerance: Tolerance | None = None

    def __repr__(self) -> str:
        return f"<{shown(self.a.path)} to {shown(self.b.path)}: {self.outcome}>"

    @property
    def within(self) -> bool | None:
        """True if every element is within the tolerance and every tensor is on both sides. None without a tolerance."""
        if self.tolerance is None:
            return None
        near = (one.status == EQUAL or (one.change is not None and not one.change.num_beyond) for one in self.results)
        return self.num_compared > 0 and all(near)

    @property
    def exit_code(self) -> int:
        """0, or 1 if a tolerance is exceeded. If a tensor could not be read, the code of the first error."""
        unreadable = (one.exit_code for one in self.results if one.status == UNREADABLE)
        return next(unreadable, int(self.within is False))

    @property
    def changed(self) -> tuple[Result, ...]:
        """Changed tensors: the model's before the optimizer's, each by descending relative error."""
        found = [one for one in self.results if one.status == DIFFERENT and one.change is not None]
        return tuple(sorted(found, key=lambda one: (self._is_state(one), -_relative(one))))

    @property
    def layers(self) -> dict[str, tuple[Result, ...]]:
        """Measured tensors by layer, then the optimizer's by role."""
        found: dict[str, list[Result]] = {}
        for one in self.results:
            if one.change is not None:
                found.setdefault(one.role if self._is_state(one) else layer_of(one.fqn), []).append(one)
        order = sorted(found, key=lambda name: (self._is_state(found[name][0]), _natural(name)))
        return {name: tuple(found[name]) for name in order}

    @cached_property
    def _roles(self) -> set[str]:
        return {one.role for one in self.results if one.change is not None}

    def _is_state(self, result: Result) -> bool:
        """Return True for an optimizer tensor. A master counts as the model's if no weights were measured."""
        return result.role not in MODEL_ROLES or (result.role == MASTER and WEIGHT in self._roles)

    def to_json(self) -> dict[str, Any]:
        allowed = self.tolerance and {"rtol": self.tolerance.rtol, "atol": self.tolerance.atol}
        layers = [
            {"layer": one_line(name), "tensors": len(results), **_together(results).to_json()}
            for name, results in self.layers.items()
        ]
        return super().to_json() | {"tolerance": allowed, "within": self.within, "layers": layers}

    def lines(self, verbose: bool = False, width: int | None = None) -> Iterator[str]:
        """Yield the layers, the most changed tensors, tensors without a partner, and the outcome."""
        rows = [(one_line(n), str(len(found)), *_cells(_together(found))) for n, found in self.layers.items()]
        if rows:
            yield from (*aligned(("layer", "tensors", *HEADS), rows, ("tensors", *HEADS), width=width), "")
        changed = self.changed if verbose else self.changed[:_SHOWN]
        if changed:
            most = list(map(_changed_row, changed))
            yield from aligned(("changed most", *HEADS, "largest at"), most, HEADS, width=width)
            yield from more_lines(len(self.changed) - len(changed))
            yield ""
        others = [one for one in self.results if one.status != EQUAL and one.change is None and not one.is_scalar]
        listed = others if verbose else others[:_SHOWN]
        yield from (result_line(one, self.a, self.b) for one in listed)
        yield from more_lines(len(others) - len(listed))
        numbers = [one for one in self.results if one.status != EQUAL and one.is_scalar]
        scalars = Counter((one.role, one.a, one.b, one.error) for one in numbers)
        for (role, x, y, error), count in scalars.items():
            yield one_line(f"{role}: {error or f'{x} in A, {y} in B'}, for {pluralize(count, 'parameter')}")
        yield from map(str, self.not_compared)
        yield from (f"note: {one_line(note)}" for note in self.notes)
        yield self.outcome

    @property
    def outcome(self) -> str:
        measured = [one for found in self.layers.values() for one in found]
        of_model = [one for one in measured if not self._is_state(one)]
        whole = _together(of_model or measured)
        text = f"{len(self.changed)} of {pluralize(self.num_compared, 'tensor')} changed ({show_size(self.num_bytes)})"
        if whole.num_changed:
            whose = "of the model " if len(of_model) < len(measured) and of_model else ""
            text += f"; {whose}relative error {_number(whole.relative)}, largest change {_number(whole.largest)}"
        every = _together(measured)
        if num_odd := sum(every.not_finite):
            text += f"; {pluralize(num_odd, 'element')} NaN or infinite"
        if self.within is not None:
            beyond = f"beyond the tolerance, {pluralize(every.num_beyond, 'element')}"
            text += "; all within the tolerance" if self.within else f"; {beyond}"
        return text


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: Only = "all",
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
    expected: Progress | None = None,
) -> Diff:
    """Measure each tensor's distance between `a` and `b`, matched by name, each in its own dtype.

    Raise the errors of `ckpt.compare.pairs.verify`.
    """
    for name, value in (("rtol", tolerance.rtol), ("atol", tolerance.atol)) if tolerance else ():
        if not 0 <= value < math.inf:
            raise UsageError(
                Message("{} is not a tolerance", Keyword(name)), expected="a finite number, not negative", found=value
            )
    judge = partial(_measure_tensors, allowed=tolerance or Tolerance())
    return Diff(a, b, *walk(a, b, only, judge, progress, expected), tolerance)


def layer_of(fqn: str) -> str:
    """Return `model.layers.3` for `model.layers.3.mlp.up_proj.weight`, `lm_head` for `lm_head.weight`."""
    found = _LAYER.match(fqn)
    return found[0] if found else fqn.rpartition(".")[0] or fqn


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layers.2` before `layers.10`."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _measure_tensors(a: Tensor, b: Tensor, reader: Reader, *, allowed: Tolerance) -> Result:
    if not can_measure(a.dtype, b.dtype):
        return differing_dtypes(a, b)
    change = measure(a.shape, a.fragments(), b.fragments(), reader, allowed, reader.advance)
    status, kind = (DIFFERENT, "values") if change.num_changed else (EQUAL, "equal")
    return Result(status, kind, a.fqn, a.role, b.fqn, b.role, nbytes=a.nbytes, change=change)


def _relative(result: Result) -> float:
    """Sort tensors first that were zero or could not be measured."""
    found = result.change.relative if result.change is not None else None
    return math.inf if found is None else found


def _together(results: Sequence[Result]) -> Change:
    return together(one.change for one in results if one.change is not None)


def _changed_row(result: Result) -> tuple[str, ...]:
    assert result.change is not None
    role = "" if result.role == WEIGHT else f" ({one_line(result.role)})"
    return one_line(result.fqn) + role, *_cells(result.change), str(list(result.change.index))


def _cells(change: Change) -> tuple[str, ...]:
    share = "-" if not change.num_changed else f"{max(change.num_changed / change.numel, 0.001):.1%}"
    return share, _number(change.relative), _number(change.cosine, ".6f"), _number(change.largest)


def _number(value: float | None, spec: str = ".3g") -> str:
    return "?" if value is None else format(value, spec)
