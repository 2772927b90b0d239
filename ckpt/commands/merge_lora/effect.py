"""What a merge did to each layer that its adapters target: changed it, had nothing to add, or was rounded away.

It is noted while the weights are computed.  Some values of each one, spread over all of it, are compared before and
behind every update; only where these are the same is the weight computed once more, and compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt import api
from ckpt.base.errors import printable
from ckpt.base.text import counted
from ckpt.commands.merge_lora.neighbours import unread
from ckpt.plan.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_SHOWN = 20  # targets that are named which were rounded away
_COMPARED = 1 << 14  # values of a weight


@dataclass(frozen=True)
class Update:
    """A change of one weight by what an adapter has for `target`, a layer or a parameter of `adapter`.

    `is_nothing` is asked where the weights of the target are the same afterwards: whether there was nothing to add.
    """

    adapter: str
    target: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    is_nothing: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Effect:
    """What became of the weight of a target: `is_changed`, or `is_nothing` was to be added; in `dtype`."""

    adapter: str
    target: str
    dtype: str
    is_changed: bool
    is_nothing: bool

    @property
    def is_lost(self) -> bool:
        """Whether something was to be added, and the weight is what it was."""
        return not self.is_changed and not self.is_nothing


@dataclass(frozen=True)
class Effects:
    """The effects of a merge on all of its targets; `num_adapters` is how many were merged."""

    targets: tuple[Effect, ...]
    num_adapters: int = 1

    @property
    def num_changed(self) -> int:
        return sum(one.is_changed for one in self.targets)

    @property
    def num_zero(self) -> int:
        """Targets that have nothing to add: a factor is zero, or trained rows are those that were there."""
        return sum(one.is_nothing for one in self.targets)

    @property
    def lost(self) -> tuple[Effect, ...]:
        """Targets that have something to add, and whose weight is what it was."""
        return tuple(one for one in self.targets if one.is_lost)

    @property
    def is_plain(self) -> bool:
        """True if every target was changed."""
        return bool(self.targets) and self.num_changed == len(self.targets)

    def to_json(self) -> dict[str, Any]:
        named = [{"adapter": printable(one.adapter), "target": printable(one.target)} for one in self.lost]
        return {"changed": self.num_changed, "zero": self.num_zero, "unchanged": named}

    def lines(self) -> Iterator[str]:
        """The counts, and what should not be so."""
        if self.targets:
            why = "nothing was to be added: a factor is zero, or trained rows are those that were there"
            zero = f"; to {self.num_zero} {why}" if self.num_zero else ""
            yield f"changed the weights of {self.num_changed} of {counted(len(self.targets), 'target')}{zero}"
        yield from self.warnings()

    def warnings(self) -> Iterator[str]:
        """What should not be so: targets that lost all that was to be added, a merge that did nothing."""
        for one in self.lost[:_SHOWN]:
            of = f" of {printable(one.adapter)}" if self.num_adapters > 1 else ""
            yield (
                f"{printable(one.target)}{of}: not changed, though its factors are not zero: all that they add is "
                f"rounded away in {one.dtype}"
            )
        if len(self.lost) > _SHOWN:
            more = counted(len(self.lost) - _SHOWN, "more target")
            yield f"and {more} without a change, although the factors are not zero"
        if self.targets and not self.num_changed:
            yield "nothing was changed: every target has the weights of the base"


@dataclass(frozen=True, slots=True)
class _Done:
    """An update of a weight in `dtype`, and whether some byte of it is another one now."""

    update: Update
    dtype: str
    is_changed: bool


@dataclass
class Noted:
    """What has been noted of the weights that were computed, by name, and how those that were not are computed.

    `made_anew` says what the adapters' files lack and was made of the base, and when that is not what training had.
    `divided` has the layers by adapter whose tied weights other layers keep as they were; `untied` are aliases that
    the result no longer ties.
    """

    num_adapters: int
    compute: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)
    found: dict[str, list[_Done]] = field(default_factory=dict)
    made_anew: list[str] = field(default_factory=list)
    divided: dict[str, list[str]] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)

    @cached_property
    def effects(self) -> Effects:
        """The effects on all targets; weights that an earlier, stopped merge has written are computed again."""
        for fqn in self.compute.keys() - self.found.keys():
            self.compute[fqn]()
        by_target: dict[tuple[str, str], list[_Done]] = {}
        for fqn in self.compute:
            for one in self.found[fqn]:
                by_target.setdefault((one.update.adapter, one.update.target), []).append(one)
        return Effects(tuple(_effect(*key, changes) for key, changes in by_target.items()), self.num_adapters)

    def updated(
        self, fqn: str, dtype: str, load: Callable[[], torch.Tensor], updates: Sequence[Update]
    ) -> torch.Tensor:
        """Return the weight in `dtype` that `load` gives, with every update in turn."""
        changes, weight = [], load()
        for number, update in enumerate(updates):
            before = _some(weight)
            weight = update.apply(weight)
            is_changed = before != _some(weight) or not _is_same(weight, load, updates[:number])
            changes.append(_Done(update, dtype, is_changed))
        self.found[fqn] = changes
        return weight


def _effect(adapter: str, target: str, changes: list[_Done]) -> Effect:
    is_changed = any(one.is_changed for one in changes)
    is_nothing = not is_changed and all(one.update.is_nothing() for one in changes)
    return Effect(adapter, target, changes[0].dtype, is_changed, is_nothing)


@dataclass(frozen=True, repr=False)
class MergedModel(api.Converted):
    """A merge that has been written, and its `effects` on the layers that are targeted."""

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
    """A conversion that merges `adapters`; `noted` has what it did to the weights that it has computed.

    `opened` are the adapters (`find.Adapter`) as they were opened, `combined` those that are merged.
    """

    noted: Noted = field(default_factory=lambda: Noted(0))
    adapters: tuple[Checkpoint, ...] = ()
    opened: tuple[Any, ...] = ()
    combined: tuple[Any, ...] = ()

    @cached_property
    def _report(self) -> dict[str, Any]:
        """The report of the conversion, with the unread files of the adapters' folders."""
        report = super()._report
        found = [one.to_json() for adapter in self.adapters for one in unread(adapter)]
        return {**report, "not_read": [*report["not_read"], *found]}

    def write(self, output: Any, **options: Any) -> MergedModel:
        """Run it, as any conversion, and say what it did."""
        written = super().write(output, **options)
        return MergedModel(**{**vars(written), "effects": self.noted.effects})


def raw_bytes(weight: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a weight, without a copy if it is contiguous."""
    import torch

    return np.asarray(weight.contiguous().reshape(-1).view(torch.uint8).numpy())


def _some(weight: torch.Tensor) -> bytes:
    """Return the bytes of some values, spread over the whole weight."""
    values = weight.reshape(-1)
    return raw_bytes(values[:: max(1, len(values) // _COMPARED)]).tobytes()


def _is_same(weight: torch.Tensor, load: Callable[[], torch.Tensor], updates: Sequence[Update]) -> bool:
    """Return True if the weight has the bytes of the loaded one with these updates."""
    before = load()
    for update in updates:
        before = update.apply(before)
    return np.array_equal(raw_bytes(before), raw_bytes(weight))
