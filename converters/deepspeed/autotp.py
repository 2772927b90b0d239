"""DeepSpeed's AutoTP: tensor parallel ranks without a pipeline, each with ZeRO files of its own.

    mp_rank_TT_model_states.pt, with ZeRO-3 zero_pp_rank_D_mp_rank_TT_model_states.pt
    [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt, without ZeRO none

Each tensor parallel rank wrote what a run of its parts alone would write.  How the parts make up the model is recorded
in its model file, for each parameter by name: `universal_checkpoint_info.affine_map`, pieces of the whole tensor and
where they are in the rank's (deepspeed 0.19.8, checkpoint/affine.py, `ParamAffineMap`; module_inject/layers.py,
`collect_autotp_universal_checkpoint_info`).  What is in no map, buffers, every rank has whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.containers.sources import RankFile, Sources
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key
from ckpt.plan.tensors import Box, Shape, Source, Tensor, contiguous_strides
from ckpt.state.unread import Unread
from converters.deepspeed.folder import tensor_parallel
from converters.deepspeed.keys import UNIVERSAL_INFO
from converters.deepspeed.parts import Joined, Part
from converters.deepspeed.rank_files import check_same
from converters.deepspeed.sums import added_up

_MAP_VERSION = 1


@dataclass(frozen=True, slots=True)
class Slice:
    """What one tensor parallel rank has: its parts as if they were a model, and its model file."""

    checkpoint: Checkpoint
    file: RankFile


@dataclass(frozen=True, slots=True)
class Map:
    """How ranks share a tensor of `shape`: the boxes of it that each has, one behind the other in its own tensor.

    `is_added`: each has a summand of all of it.
    """

    shape: Shape
    shards: tuple[Shape, ...]
    boxes: tuple[tuple[Box, ...], ...]
    is_replicated: bool
    is_added: bool = False


def joined(
    slices: Sequence[Slice], maps: Mapping[str, Map], sources: Sources, how: str = "as AutoTP recorded them"
) -> Checkpoint:
    """The model that tensor parallel ranks have together; `sources` knows the storages of all their files.

    Raises NotFoundError for a tensor of which no map tells, CorruptError where maps and tensors do not agree, or two
    files hold the very same.
    """
    first = slices[0].checkpoint
    for other in slices[1:]:
        _check_alike(slices[0], other)
    check_same("step", [(each.file, each.file.content.get("global_steps")) for each in slices])
    dp = first.world_size or 1
    computed: dict[str, Callable[[], memoryview]] = {}
    unread = Unread()
    tensors: dict[Key, Tensor] = {}
    for fqn, role in first.tensors:
        if not (fqn in maps and maps[fqn].is_added):
            tensors[fqn, role] = _tensor((fqn, role), slices, maps, dp)
        elif role in (WEIGHT, MASTER):
            held = _held((fqn, role), slices, maps[fqn])
            tensors[fqn, role], found = added_up(held, slices[0].file.path)
            computed |= found
        else:
            unread.add(role, "ranks add up what they have of it, and that of their sum is not known", [fqn])
    config = dict(first.state.ds_config or {})
    config.pop("tensor_parallel", None)  # what is read are whole tensors
    quantized = next((method for each in slices for method in each.checkpoint.quantized.values()), None)
    if quantized is not None:
        raise NotFoundError(
            f"optimizer states of AutoTP's ranks that are stored quantized ({quantized}) are not supported",
            path=first.path,
        )
    _check_distinct(slices, maps, sources)
    return replace(
        first,
        tensors=tensors,
        files=tuple(file for each in slices for file in each.checkpoint.files),
        world_size=dp * len(slices),
        state=replace(first.state, ds_config=config or None),
        notes=(*first.notes, *sources.notes, f"parts of {len(slices)} tensor parallel ranks are put together {how}"),
        computed=computed,
        unread=(*first.unread, *unread.sentences),
    )


def _check_alike(first: Slice, other: Slice) -> None:
    """Ranks have parts of the same tensors in the same param groups, after the same steps."""
    a, b = first.checkpoint, other.checkpoint
    told = (
        ("tensors", a.tensors.keys(), {key for key in b.tensors if key[0] not in a.ties}),  # rank 0 alone records ties
        ("param groups", a.state.param_groups, b.state.param_groups),
        ("states of one number", a.state.scalars, b.state.scalars),
        ("data parallel ranks", a.world_size, b.world_size),
        ("ZeRO stage", a.state.zero_stage, b.state.zero_stage),
    )
    for what, ours, theirs in told:
        if ours != theirs:
            raise CorruptError(
                f"tensor parallel ranks have different {what}: files of different runs in one folder?",
                path=other.file.path,
                expected=f"as {first.file.path}",
            )


def _check_distinct(slices: Sequence[Slice], maps: Mapping[str, Map], sources: Sources) -> None:
    """Of files with parts that ranks do not share: a partition of an embedding may well be the same on each."""
    own = {fqn for fqn, one in maps.items() if not one.is_replicated}
    parts = (t for one in slices for (fqn, _), t in one.checkpoint.tensors.items() if fqn in own)
    with_own = {fragment.extent.path for part in parts for fragment in part.fragments()}
    sources.check_distinct((number, file) for number, file in enumerate(sources.storages) if file in with_own)


def _tensor(key: Key, slices: Sequence[Slice], maps: Mapping[str, Map], dp: int) -> Tensor:
    fqn, role = key
    first = slices[0].checkpoint.tensors[key]
    if role == BUFFER:
        known = Map(first.shape, (first.shape,) * len(slices), ((),) * len(slices), True)
    elif fqn not in maps:
        raise tensor_parallel(slices[0].file.path, f", and nothing is recorded of {fqn}")
    else:
        known = maps[fqn]
    held = _held(key, slices, known)
    if known.is_replicated:
        replicas: tuple[Source, ...] = tuple(source for one in held for source in (one.source, *one.replicas))
        return replace(first, replicas=replicas[1:])
    # mesh of the engine: data parallel ranks of one tensor parallel rank are tp apart
    parts = tuple(
        Part(one.shape, boxes, one.source, range(tp, dp * len(held), len(held)))
        for tp, (one, boxes) in enumerate(zip(held, known.boxes, strict=True))
    )
    return replace(first, shape=known.shape, source=Joined(parts), replicas=())


def _held(key: Key, slices: Sequence[Slice], known: Map) -> list[Tensor]:
    """The ranks' parts of a tensor; CorruptError where one is not as `known` has it."""
    held = [one.checkpoint.tensors[key] for one in slices]
    check_parts("a tensor parallel rank's", held, known, [one.file.path for one in slices])
    return held


def check_parts(whose: str, held: Sequence[Tensor | None], known: Map, paths: Sequence[str]) -> None:
    """CorruptError where a rank's part of a tensor, in one of the files, is not as `known` has it."""
    first = next(one for one in held if one is not None)
    for one, shard, path in zip(held, known.shards, paths, strict=True):
        if one is None or (one.shape, one.dtype) != (shard, first.dtype):
            raise CorruptError(
                f"{whose} part is not as it is recorded ({first.role})",
                path=path,
                fqn=first.fqn,
                expected=f"{first.dtype} {list(shard)}",
                found=f"{one.dtype} {list(one.shape)}" if one else "none",
            )


def recorded_maps(file: RankFile, ranks: Sequence[int]) -> dict[str, Map]:
    """The map of each parameter, as the model file of the first of `ranks` has it.

    NotFoundError where there is none, or none that is a cut.
    """
    info = file.content.get(UNIVERSAL_INFO)
    recorded = info.get("affine_map") if isinstance(info, Mapping) else None
    if not isinstance(recorded, Mapping) or recorded.get("version") != _MAP_VERSION:
        raise tensor_parallel(file.path)
    # patterns are whole names, escaped
    known = {f"^{re.escape(fqn)}$": fqn for fqn in file.need("module") if isinstance(fqn, str)}
    return {
        known[pattern]: map_of(known[pattern], entry, ranks, file)
        for pattern, entry in recorded["params"].items()
        if pattern in known
    }


def map_of(
    fqn: str,
    entry: Mapping[str, Any],
    found: Sequence[int],
    file: RankFile,
    unsupported: Callable[[str, str], NotFoundError] = tensor_parallel,
) -> Map:
    """How the ranks that were `found` share a parameter, as it is recorded.

    CorruptError where it is other ranks that share it, `unsupported` where no rank's part is a cut.
    """
    shape = tuple(entry["logical_shape"])
    ranks = {int(rank): one for rank, one in entry["ranks"].items()}
    if sorted(ranks) != list(found) or len(found) != found[-1] + 1:
        raise CorruptError(
            "the ranks that share a parameter are not those that have files",
            path=file.path,
            fqn=fqn,
            expected=f"ranks {', '.join(map(str, sorted(ranks)))}",
            found=f"files of ranks {', '.join(map(str, found))}",
        )
    shards = tuple(tuple(ranks[rank]["shard_shape"]) for rank in found)
    boxes = tuple(_boxes(fqn, ranks[rank]["pieces"], shape, shards[rank], file, unsupported) for rank in found)
    return Map(shape, shards, boxes, all(own == (Box((0,) * len(shape), shape),) for own in boxes))


def _boxes(
    fqn: str,
    pieces: Sequence[Mapping[str, Any]],
    shape: Shape,
    shard: Shape,
    file: RankFile,
    unsupported: Callable[[str, str], NotFoundError],
) -> tuple[Box, ...]:
    """A rank's pieces as boxes of the whole tensor, if they lie one behind the other in the rank's own."""
    found, at, strides = [], 0, contiguous_strides(shape)
    for piece in pieces:
        sizes, (start, steps) = tuple(piece["shape"]), piece["source"]
        place, inner = piece["dest"]
        follows = len(pieces) == 1 or sizes[1:] == shard[1:]
        is_box = len(sizes) == len(shape) and tuple(steps) == strides and place == at and follows
        if not is_box or tuple(inner) != contiguous_strides(shard) or piece.get("scale", 1.0) != 1.0:
            reason = (
                "a bias that ranks hold divided by their number" if piece.get("scale", 1.0) != 1.0 else "fused parts"
            )
            raise unsupported(file.path, f": {fqn} is shared in a way that is no cut ({reason})")
        offsets = []
        for stride in strides:
            offset, start = divmod(start, stride) if stride else (0, start)
            offsets.append(offset)
        found.append(Box(tuple(offsets), sizes))
        at += prod(sizes)
    if at != prod(shard):
        raise CorruptError(
            "the pieces of a parameter do not make up a rank's part of it",
            path=file.path,
            fqn=fqn,
            expected=f"{prod(shard)} elements",
            found=f"{at} elements",
        )
    return tuple(found)
