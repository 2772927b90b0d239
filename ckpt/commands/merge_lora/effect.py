"""Effect of a merge on each targeted layer: changed, nothing to add, or rounded away.

If a sample of the weight is equal before and after, the weight is compared in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt import api
from ckpt.base.errors import printable
from ckpt.base.text import pluralize
from ckpt.commands.merge_lora.unmerged_files import unread
from ckpt.plan.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_SHOWN = 20
_COMPARED = 1 << 14  # sampled values per weight


@dataclass(frozen=True)
class Update:
    """A change to one weight by `adapter`, for `target`: a layer or a parameter.

    `is_nothing` returns True if there was nothing to add. `by_rows` is set if rows can be merged one after another: it
    gets the weight's dtype, and returns a function that merges into some rows, given the first row's number.
    """

    adapter: str
    target: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    is_nothing: Callable[[], bool]
    by_rows: Callable[[torch.dtype], Callable[[torch.Tensor, int], None]] | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    adapter: str
    target: str
    dtype: str
    is_changed: bool
    is_nothing: bool

    @property
    def is_lost(self) -> bool:
        return not self.is_changed and not self.is_nothing


@dataclass(frozen=True)
class Effects:
    targets: tuple[Effect, ...]
    num_adapters: int = 1

    @property
    def num_changed(self) -> int:
        return sum(one.is_changed for one in self.targets)

    @property
    def num_zero(self) -> int:
        """Targets with nothing to add: a factor is zero, or trained rows equal the old ones."""
        return sum(one.is_nothing for one in self.targets)

    @property
    def lost(self) -> tuple[Effect, ...]:
        return tuple(one for one in self.targets if one.is_lost)

    @property
    def is_plain(self) -> bool:
        return bool(self.targets) and self.num_changed == len(self.targets)

    def to_json(self) -> dict[str, Any]:
        named = [{"adapter": printable(one.adapter), "target": printable(one.target)} for one in self.lost]
        return {"changed": self.num_changed, "zero": self.num_zero, "unchanged": named}

    def lines(self) -> Iterator[str]:
        if self.targets:
            why = "nothing was to be added: a factor is zero, or trained rows equal the base's"
            zero = f"; to {self.num_zero} {why}" if self.num_zero else ""
            yield f"changed the weights of {self.num_changed} of {pluralize(len(self.targets), 'target')}{zero}"
        yield from self.warnings()

    def warnings(self) -> Iterator[str]:
        for one in self.lost[:_SHOWN]:
            of = f" of {printable(one.adapter)}" if self.num_adapters > 1 else ""
            yield (
                f"{printable(one.target)}{of}: not changed, although its factors are not zero: the whole change is "
                f"rounded away in {one.dtype}"
            )
        if len(self.lost) > _SHOWN:
            more = pluralize(len(self.lost) - _SHOWN, "more target")
            yield f"and {more} without a change, although their factors are not zero"
        if self.targets and not self.num_changed:
            yield "nothing was changed: every target equals the base"


@dataclass(frozen=True, slots=True)
class _AppliedUpdate:
    update: Update
    dtype: str
    is_changed: bool


@dataclass
class Noted:
    """Computed weights by name, with functions to `compute` the others.

    `made_anew` describes tensors missing from the adapter's file: PEFT computed them from the base. `divided` maps each
    adapter to its changed layers with unchanged tied weights, `shared` to the tied layers that get one change together.
    `untied` holds aliases that the result no longer ties.
    """

    num_adapters: int
    compute: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)
    found: dict[str, list[_AppliedUpdate]] = field(default_factory=dict)
    made_anew: list[str] = field(default_factory=list)
    divided: dict[str, list[str]] = field(default_factory=dict)
    shared: dict[str, list[str]] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)

    @cached_property
    def effects(self) -> Effects:
        """Effects on all targets."""
        for fqn in self.compute.keys() - self.found.keys():
            self.compute[fqn]()
        by_target: dict[tuple[str, str], list[_AppliedUpdate]] = {}
        for fqn in self.compute:
            for one in self.found[fqn]:
                by_target.setdefault((one.update.adapter, one.update.target), []).append(one)
        return Effects(tuple(_effect(*key, changes) for key, changes in by_target.items()), self.num_adapters)

    def updated(
        self, fqn: str, dtype: str, load: Callable[[], torch.Tensor], updates: Sequence[Update]
    ) -> torch.Tensor:
        changes, weight = [], load()
        for number, update in enumerate(updates):
            before = _sample_bytes(weight)
            weight = update.apply(weight)
            is_changed = before != _sample_bytes(weight) or not _is_same(weight, load, updates[:number])
            changes.append(_AppliedUpdate(update, dtype, is_changed))
        self.found[fqn] = changes
        return weight

    def updated_rows(
        self, fqn: str, dtype: str, parts: Iterator[torch.Tensor], add: Callable[[torch.Tensor, int], None], of: Update
    ) -> Iterator[torch.Tensor]:
        """Yield the weight's parts after `add`."""
        is_changed, first = False, 0
        for part in parts:
            before = None if is_changed else part.clone()
            add(part, first)
            is_changed = is_changed or not np.array_equal(raw_bytes(before), raw_bytes(part))
            first += len(part)
            yield part
        self.found[fqn] = [_AppliedUpdate(of, dtype, is_changed)]


def _effect(adapter: str, target: str, changes: list[_AppliedUpdate]) -> Effect:
    is_changed = any(one.is_changed for one in changes)
    is_nothing = not is_changed and all(one.update.is_nothing() for one in changes)
    return Effect(adapter, target, changes[0].dtype, is_changed, is_nothing)


@dataclass(frozen=True, repr=False)
class MergedModel(api.Converted):
    effects: Effects = Effects(())

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "targets": self.effects.to_json()}

    def outcome(self, verbose: bool = False) -> list[str]:
        *lines, wrote = super().outcome(verbose)
        if self.effects.is_plain and not verbose:
            return [*lines, f"{wrote}; {next(self.effects.lines())}"]
        return [*lines, *self.effects.lines(), wrote]


@dataclass(frozen=True, repr=False)
class Merge(api.Conversion):
    """A conversion that merges `adapters`.

    `opened` holds the adapters before combining, `combined` the merged ones.
    """

    noted: Noted = field(default_factory=lambda: Noted(0))
    adapters: tuple[Checkpoint, ...] = ()
    opened: tuple[Any, ...] = ()
    combined: tuple[Any, ...] = ()

    @cached_property
    def _report(self) -> dict[str, Any]:
        report = super()._report
        found = [one.to_json() for adapter in self.adapters for one in unread(adapter)]
        return {**report, "not_read": [*report["not_read"], *found]}

    def write(self, output: Any, **options: Any) -> MergedModel:
        written = super().write(output, **options)
        return MergedModel(**{**vars(written), "effects": self.noted.effects})


def raw_bytes(weight: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    return np.asarray(weight.contiguous().reshape(-1).view(torch.uint8).numpy())


def _sample_bytes(weight: torch.Tensor) -> bytes:
    values = weight.reshape(-1)
    return raw_bytes(values[:: max(1, len(values) // _COMPARED)]).tobytes()


def _is_same(weight: torch.Tensor, load: Callable[[], torch.Tensor], updates: Sequence[Update]) -> bool:
    before = load()
    for update in updates:
        before = update.apply(before)
    return np.array_equal(raw_bytes(before), raw_bytes(weight))
