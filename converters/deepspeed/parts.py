from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.plan.tensors import Box, FlatRange, Fragment, Shape, Source, flat_regions


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part with its own `shape`. `boxes` lie end to end along dim 0.

    `ranks` maps `source`'s data-parallel ranks to the run's ranks.
    """

    shape: Shape
    boxes: tuple[Box, ...]
    source: Source
    ranks: Sequence[int] | None

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        for found in self.source.fragments(self.shape):
            fragment = found._replace(rank=self.ranks[found.rank or 0] if self.ranks else None)
            if isinstance(fragment.region, Box):
                at = 0
                for box in self.boxes:
                    inner = Box((at, *(0,) * (len(box.sizes) - 1)), box.sizes) if box.sizes else box
                    yield Fragment(box, fragment.extent.narrow(inner), fragment.rank)
                    at += box.sizes[0] if box.sizes else 0
                continue
            start, stop = fragment.region
            for region, at in flat_regions(self.boxes, shape, start, stop):
                yield Fragment(region, fragment.extent.holding(region, at - start), fragment.rank)


@dataclass(frozen=True, slots=True)
class Joined:
    parts: tuple[RankPart, ...]

    def fragments(self, shape: Shape) -> Iterator[Fragment]:
        found = [fragment for part in self.parts for fragment in part.fragments(shape)]
        if all(isinstance(fragment.region, FlatRange) for fragment in found):
            found.sort(key=lambda fragment: fragment.region.start)  # type: ignore[union-attr]
        yield from found
