"""Sharing of a model's tensors over ranks.

    autotp.recorded          tensor-parallel ranks, recorded by AutoTP
    neox.known_by_name       tensor-parallel ranks in GPT-NeoX, which records nothing
    autoep.recorded          expert-parallel ranks, recorded by AutoEP
    experts.read_experts     expert-parallel ranks in DeepSpeed's MoE layers, by the number of experts
    Sharing(path)            nothing is shared

Data-parallel ranks with the same experts share flat buffers (deepspeed 0.19.8, utils/groups.py,
`_create_expert_and_data_parallel`): every n-th rank, or consecutive ranks with `use_data_before_expert_parallelism`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import Key
from ckpt.plan.tensors import Box, Shape, Source, Tensor, whole
from converters.deepspeed.folder import experts_unsupported
from converters.deepspeed.keys import EXPERT
from converters.deepspeed.parts import Joined, RankPart


@dataclass(frozen=True, slots=True)
class Cut:
    """Sharded tensor with whole `shape`: each rank's boxes, laid end to end in the rank's shard.

    If `is_added`, each rank has a summand of the tensor instead.
    """

    shape: Shape
    shards: tuple[Shape, ...]
    boxes: tuple[tuple[Box, ...], ...]
    is_added: bool = False

    @property
    def is_replicated(self) -> bool:
        return all(boxes == (whole(self.shape),) for boxes in self.boxes)

    def check(self, whose: str, held: Sequence[Tensor | None], paths: Sequence[str]) -> list[Tensor]:
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
        if self.is_replicated and len(held) > 1:
            sources: list[Source] = [source for one in held for source in (one.source, *one.replicas)]
            return held[0]._replace(replicas=tuple(sources[1:]))
        each = zip(held, self.boxes, ranks, strict=True)
        parts = tuple(RankPart(one.shape, boxes, one.source, own) for one, boxes, own in each)
        return held[0]._replace(shape=self.shape, source=Joined(parts), replicas=())


@dataclass(frozen=True)
class Sharing:
    """Boxes on each of `num_ranks` ranks, by the tensor's whole-model name.

    `cuts` has the tensors with recorded or inferred boxes, `counts` the experts per MoE layer, by name prefix. An
    expert is whole on one rank, any other tensor on every rank.

    Example:
        Sharing(file.path, len(ranks), cuts)  # AutoTP's ranks
    """

    path: str
    num_ranks: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    is_in_rows: bool = False
    #: Joining rule for notes, and client state for a run with whole tensors.
    how: str = "by AutoTP's record"
    client: Mapping[str, Any] = field(default_factory=dict)

    def is_shared(self, fqn: str) -> bool:
        """Return True if ranks have different parts, or only some have it."""
        return fqn in self.cuts or EXPERT.fullmatch(fqn) is not None

    def rank_of(self, fqn: str) -> int | None:
        match = EXPERT.fullmatch(fqn)
        return int(match[2]) // (self._each(match) or 1) if match else None

    def name_on_rank(self, fqn: str) -> str:
        match = EXPERT.fullmatch(fqn)
        return numbered(fqn, int(match[2]) % self._each(match)) if match else fqn

    def name_in_model(self, fqn: str, rank: int) -> str:
        match = EXPERT.fullmatch(fqn)
        return numbered(fqn, rank * self._each(match) + int(match[2])) if match else fqn

    def _each(self, match: re.Match[str]) -> int:
        return self.counts[match[1]] // self.num_ranks

    def rank_shapes(self, rank: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return a rank's shapes by whole-model name."""
        return {
            fqn: self.cuts[fqn].shards[rank] if fqn in self.cuts else shape
            for fqn, shape in shapes.items()
            if fqn in self.cuts or self.rank_of(fqn) in (None, rank)
        }

    def in_order(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Use registration order, each parameter once."""
        fqns, layers = tuple(dict.fromkeys(fqns)), list(self.counts)
        matches = [match for match in map(EXPERT.fullmatch, fqns) if match]
        if len(matches) < len(fqns):
            return fqns
        places = {match[0]: (layers.index(match[1]), int(match[2])) for match in matches}
        return tuple(sorted(fqns, key=places.__getitem__))

    def holders(self, rank: int, world_size: int) -> range:
        """Return data-parallel ranks with an expert-parallel rank's experts."""
        count = world_size // self.num_ranks
        return range(rank * count, (rank + 1) * count) if self.is_in_rows else range(rank, world_size, self.num_ranks)

    def place(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the expert-parallel rank, and the index among ranks with the same experts."""
        every = ((own, self.holders(own, world_size)) for own in range(self.num_ranks))
        return next((own, ranks.index(rank)) for own, ranks in every if rank in ranks)

    def sharers(
        self, shapes: Mapping[str, Shape], count: int, world_size: int
    ) -> Iterator[tuple[range, dict[str, Shape]]]:
        """Yield the ranks that share a flat buffer, and its parameters by model name."""
        if count == world_size and not any(map(self.is_shared, shapes)):
            yield range(world_size), dict(shapes)
            return
        self.check_buffer(shapes, count, world_size)
        known = replace(self, num_ranks=world_size // count)
        for rank in range(known.num_ranks):
            named = {known.name_in_model(fqn, rank): shape for fqn, shape in shapes.items()}
            yield known.holders(rank, world_size), known.rank_shapes(rank, named)

    def check_buffer(self, shapes: Mapping[str, Shape], count: int, world_size: int) -> None:
        """Raise an error unless a flat buffer holds only experts, sharded like on the ranks."""
        if not self.cuts:
            self._check_counted(shapes, count, world_size)
            return
        if count * self.num_ranks != world_size or not all(fqn in self.cuts for fqn in shapes):
            raise experts_unsupported(self.path, " (AutoEP) in a param group with other parameters")
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
                f"a parameter group partitioned over {count} of {pluralize(world_size, 'rank')} is supported only "
                "for experts (DeepSpeed-MoE)",
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
                    "a rank has experts missing from the layer",
                    path=self.path,
                    fqn=layer,
                    expected=f"{pluralize(known, 'expert')} on {num_ranks} expert parallel ranks",
                    found=f"experts {', '.join(map(str, sorted(numbers)))} on rank 0",
                )

    def together(self, parts: Sequence[Mapping[Key, Tensor]], ranks: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Join `parts`. A part's fragments name their rank by its index in `ranks`."""
        every = [(key, tensor) for part in parts for key, tensor in part.items()]
        yield from (tensor for (fqn, _), tensor in every if fqn not in self.cuts)
        for key in dict.fromkeys(key for key, _ in every if key[0] in self.cuts):
            cut, held = self.cuts[key[0]], [part.get(key) for part in parts]
            yield cut.joined(cut.check("an expert parallel rank's", held, [self.path] * len(held)), ranks)


def numbered(fqn: str, number: int) -> str:
    return EXPERT.sub(rf"\g<1>{number}\g<3>", fqn)
