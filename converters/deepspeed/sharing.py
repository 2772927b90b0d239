"""How ranks share the tensors of a model: which boxes of each tensor every rank has, by the tensor's name.

One class for all who share, and five ways to know it:

    autotp.recorded          tensor parallel ranks, as AutoTP recorded them
    neox.known_by_name       tensor parallel ranks of GPT-NeoX, which records nothing
    autoep.recorded          expert parallel ranks of AutoEP, as it recorded them
    experts.read_experts     expert parallel ranks of DeepSpeed's MoE layers, by the number of experts
    Sharing(path)            nothing is shared

Which data parallel ranks have the same experts, and flat buffers of them, follows from deepspeed 0.19.8, utils/
groups.py, `_create_expert_and_data_parallel`: every n-th one, or with `use_data_before_expert_parallelism` as many in a
row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.text import counted
from ckpt.plan.checkpoint import Key
from ckpt.plan.tensors import Box, Shape, Source, Tensor, whole
from converters.deepspeed.folder import experts_unsupported
from converters.deepspeed.keys import EXPERT
from converters.deepspeed.parts import Joined, RankPart


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of `shape` that ranks share: the boxes of it that each has, one behind the other in its own tensor.

    `shards` are the shapes of the ranks' own tensors.  `is_added`: each has a summand of the whole.
    """

    shape: Shape
    shards: tuple[Shape, ...]
    boxes: tuple[tuple[Box, ...], ...]
    is_added: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of the tensor."""
        return all(boxes == (whole(self.shape),) for boxes in self.boxes)

    def check(self, whose: str, held: Sequence[Tensor | None], paths: Sequence[str]) -> list[Tensor]:
        """The ranks' parts, each from one of `paths`; CorruptError for one that is missing, or not as `shards` say."""
        first = next(one for one in held if one is not None)
        found = []
        for one, shard, path in zip(held, self.shards, paths, strict=True):
            if one is None or (one.shape, one.dtype) != (shard, first.dtype):
                raise CorruptError(
                    f"{whose} part does not match its record ({first.role})",
                    path=path,
                    fqn=first.fqn,
                    expected=f"{first.dtype} {list(shard)}",
                    found=f"{one.dtype} {list(one.shape)}" if one else "none",
                )
            found.append(one)
        return found

    def joined(self, held: Sequence[Tensor], ranks: Sequence[Sequence[int]]) -> Tensor:
        """The whole tensor, made of the ranks' parts; `ranks` are the data parallel ranks that have each part."""
        if self.is_replicated and len(held) > 1:
            sources: list[Source] = [source for one in held for source in (one.source, *one.replicas)]
            return replace(held[0], replicas=tuple(sources[1:]))
        each = zip(held, self.boxes, ranks, strict=True)
        parts = tuple(RankPart(one.shape, boxes, one.source, own) for one, boxes, own in each)
        return replace(held[0], shape=self.shape, source=Joined(parts), replicas=())


@dataclass(frozen=True)
class Sharing:
    """The boxes of each tensor that each of `num_ranks` ranks holds, by the tensor's name in the whole model.

    `cuts` has the tensors whose boxes are recorded, or known by their names.  `counts` has the number of experts of
    each MoE layer of DeepSpeed's, by what their names begin with: an expert is whole on one rank, which numbers its own
    from 0.  Every rank has all of any other tensor.  `path` is the file that tells it.
    """

    path: str
    num_ranks: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    #: `use_data_before_expert_parallelism`: the data parallel ranks with the same experts are in a row.
    is_in_rows: bool = False
    #: How tensor parallel ranks are put together, in words, and what the user's state says of a run of whole tensors.
    how: str = "as AutoTP recorded them"
    client: Mapping[str, Any] = field(default_factory=dict)

    def is_shared(self, fqn: str) -> bool:
        """Whether ranks have different parts of a tensor, or only some have it."""
        return fqn in self.cuts or EXPERT.fullmatch(fqn) is not None

    def rank_of(self, fqn: str) -> int | None:
        """The rank that has an expert; None for a tensor of no expert."""
        match = EXPERT.fullmatch(fqn)
        return int(match[2]) // (self._each(match) or 1) if match else None

    def name_on_rank(self, fqn: str) -> str:
        """The name of an expert's tensor on the rank that has the expert."""
        match = EXPERT.fullmatch(fqn)
        return numbered(fqn, int(match[2]) % self._each(match)) if match else fqn

    def name_in_model(self, fqn: str, rank: int) -> str:
        """The name in the whole model of the tensor that a rank calls `fqn`."""
        match = EXPERT.fullmatch(fqn)
        return numbered(fqn, rank * self._each(match) + int(match[2])) if match else fqn

    def _each(self, match: re.Match[str]) -> int:
        """The number of experts that a rank has of a layer."""
        return self.counts[match[1]] // self.num_ranks

    def held_by(self, rank: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The tensors of the whole model that a rank has, with the shapes of its parts of them."""
        return {
            fqn: self.cuts[fqn].shards[rank] if fqn in self.cuts else shape
            for fqn, shape in shapes.items()
            if fqn in self.cuts or self.rank_of(fqn) in (None, rank)
        }

    def in_order(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Parameters of a group in the order in which the model registers them, each once."""
        fqns, layers = tuple(dict.fromkeys(fqns)), list(self.counts)
        matches = [match for match in map(EXPERT.fullmatch, fqns) if match]
        if len(matches) < len(fqns):
            return fqns
        places = {match[0]: (layers.index(match[1]), int(match[2])) for match in matches}
        return tuple(sorted(fqns, key=places.__getitem__))

    def holders(self, rank: int, world_size: int) -> range:
        """The data parallel ranks of `world_size` that have what an expert parallel rank has."""
        count = world_size // self.num_ranks
        return range(rank * count, (rank + 1) * count) if self.is_in_rows else range(rank, world_size, self.num_ranks)

    def place(self, rank: int, world_size: int) -> tuple[int, int]:
        """A data parallel rank's number among those with other experts, and among those with the same."""
        every = ((own, self.holders(own, world_size)) for own in range(self.num_ranks))
        return next((own, ranks.index(rank)) for own, ranks in every if rank in ranks)

    def sharers(
        self, shapes: Mapping[str, Shape], count: int, world_size: int
    ) -> Iterator[tuple[range, dict[str, Shape]]]:
        """The data parallel ranks that share a flat buffer of a param group, and its parameters by name in the model.

        Rank 0 recorded `shapes`; `count` of `world_size` ranks share a buffer.  One buffer that all share, or one for
        each expert parallel rank.
        """
        if count == world_size and not any(map(self.is_shared, shapes)):
            yield range(world_size), dict(shapes)
            return
        self.check_buffer(shapes, count, world_size)
        known = replace(self, num_ranks=world_size // count)
        for rank in range(known.num_ranks):
            named = {known.name_in_model(fqn, rank): shape for fqn, shape in shapes.items()}
            yield known.holders(rank, world_size), known.held_by(rank, named)

    def check_buffer(self, shapes: Mapping[str, Shape], count: int, world_size: int) -> None:
        """Refuse a flat buffer of `count` of `world_size` ranks that is not of experts alone, as ranks have them."""
        if not self.cuts:
            self._check_counted(shapes, count, world_size)
            return
        if count * self.num_ranks != world_size or not all(fqn in self.cuts for fqn in shapes):
            raise experts_unsupported(self.path, " (AutoEP) and whose param group has other parameters beside them")
        for fqn, shape in shapes.items():
            if shape not in self.cuts[fqn].shards:
                raise CorruptError(
                    "an expert parallel rank's part does not match its record",
                    path=self.path,
                    fqn=fqn,
                    expected=list(self.cuts[fqn].shards[0]),
                    found=list(shape),
                )

    def _check_counted(self, fqns: Iterable[str], count: int, world_size: int) -> None:
        matches = [EXPERT.fullmatch(fqn) for fqn in fqns]
        if not self.counts or not all(matches) or world_size % count:
            raise NotFoundError(
                f"a parameter group partitioned over {count} of {counted(world_size, 'rank')} is not supported, "
                "unless it is DeepSpeed-MoE's, of experts alone",
                path=self.path,
            )
        num_ranks = world_size // count
        here: dict[str, set[int]] = {}
        for match in matches:
            assert match is not None
            here.setdefault(match[1], set()).add(int(match[2]))
        for layer, numbers in here.items():
            known = self.counts.get(layer, 0)
            if known % num_ranks or max(numbers) >= known // num_ranks:
                raise CorruptError(
                    "a rank has experts that the layer does not have",
                    path=self.path,
                    fqn=layer,
                    expected=f"{counted(known, 'expert')} on {num_ranks} expert parallel ranks",
                    found=f"experts {', '.join(map(str, sorted(numbers)))} on rank 0",
                )

    def together(self, parts: Sequence[Mapping[Key, Tensor]], ranks: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """The tensors of which expert parallel ranks have `parts`, by data parallel ranks.

        Fragments of a part name their rank by its place in `ranks`.
        """
        every = [(key, tensor) for part in parts for key, tensor in part.items()]
        yield from (tensor for (fqn, _), tensor in every if fqn not in self.cuts)
        for key in dict.fromkeys(key for key, _ in every if key[0] in self.cuts):
            cut, held = self.cuts[key[0]], [part.get(key) for part in parts]
            yield cut.joined(cut.check("an expert parallel rank's", held, [self.path] * len(held)), ranks)


def numbered(fqn: str, number: int) -> str:
    """The same tensor of the expert with another number."""
    return EXPERT.sub(rf"\g<1>{number}\g<3>", fqn)
