"""What a merge did to each layer that its adapters target: changed it, had nothing to add, or was rounded away.

It is noted while the weights are computed: of each one the digests of its bytes before and behind every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt import api
from ckpt.base.errors import printable
from ckpt.base.text import counted

if TYPE_CHECKING:
    import torch

_SHOWN = 20  # targets that are named which were rounded away


@dataclass(frozen=True)
class Update:
    """A change of one weight by what an adapter has for `target`, a layer or a parameter of `adapter`.

    `is_nothing` is asked where the weight is the same afterwards: whether there was nothing to add to it.
    """

    adapter: str
    target: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    is_nothing: Callable[[torch.Tensor], bool]


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
        """Targets that have nothing to add: one of their factors is zero."""
        return sum(one.is_nothing for one in self.targets)

    @property
    def lost(self) -> tuple[Effect, ...]:
        """Targets that have something to add, and whose weight is what it was."""
        return tuple(one for one in self.targets if one.is_lost)

    def to_json(self) -> dict[str, Any]:
        named = [{"adapter": printable(one.adapter), "target": printable(one.target)} for one in self.lost]
        return {"changed": self.num_changed, "zero": self.num_zero, "unchanged": named}

    def lines(self) -> Iterator[str]:
        """The counts, and what should not be so."""
        if self.targets:
            zero = f"; of {self.num_zero} a factor is zero, and nothing was to be added" if self.num_zero else ""
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
            yield f"and {len(self.lost) - _SHOWN} more targets that were not changed, though their factors are not zero"
        if self.targets and not self.num_changed:
            yield "nothing was changed: every target has the weights of the base"


@dataclass
class Noted:
    """What has been noted of the weights that were computed, by name, and how those that were not are computed."""

    num_adapters: int
    compute: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)
    found: dict[str, list[Effect]] = field(default_factory=dict)

    def effects(self) -> Effects:
        """The effects on all targets; weights that an earlier, stopped merge has written are computed again."""
        for fqn in self.compute.keys() - self.found.keys():
            self.compute[fqn]()
        by_target: dict[tuple[str, str], Effect] = {}
        for fqn in self.compute:
            for one in self.found[fqn]:
                before = by_target.setdefault((one.adapter, one.target), one)
                by_target[one.adapter, one.target] = replace(
                    before,
                    is_changed=before.is_changed or one.is_changed,
                    is_nothing=before.is_nothing and one.is_nothing and not one.is_changed,
                )
        return Effects(tuple(by_target.values()), self.num_adapters)

    def updated(self, fqn: str, weight: torch.Tensor, updates: tuple[Update, ...]) -> torch.Tensor:
        """`weight` with every update in turn."""
        effects, before, dtype = [], _digest(weight), str(weight.dtype).removeprefix("torch.")
        for update in updates:
            weight = update.apply(weight)
            after = _digest(weight)
            is_nothing = after == before and update.is_nothing(weight)
            effects.append(Effect(update.adapter, update.target, dtype, after != before, is_nothing))
            before = after
        self.found[fqn] = effects
        return weight


@dataclass(frozen=True, repr=False)
class MergedModel(api.Converted):
    """A merge that has been written, and its `effects` on the layers that are targeted."""

    effects: Effects = Effects(())

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "targets": self.effects.to_json()}

    def lines(self) -> list[str]:
        *lines, wrote = super().lines()
        return [*lines, *self.effects.lines(), wrote]


@dataclass(frozen=True, repr=False)
class Merge(api.Conversion):
    """A conversion that merges adapters; `noted` has what it did to the weights that it has computed."""

    noted: Noted = field(default_factory=lambda: Noted(0))

    def write(self, output: Any, **options: Any) -> MergedModel:
        """Run it, as any conversion, and say what it did."""
        written = super().write(output, **options)
        return MergedModel(**{**vars(written), "effects": self.noted.effects()})


def _digest(weight: torch.Tensor) -> bytes:
    """A digest of the bytes of a weight, which takes no memory as a copy would."""
    import torch
    from xxhash import xxh3_128_digest

    return xxh3_128_digest(weight.contiguous().reshape(-1).view(torch.uint8).numpy())
