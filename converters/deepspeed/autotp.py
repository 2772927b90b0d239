"""DeepSpeed's AutoTP: tensor-parallel ranks without a pipeline, each with its own ZeRO files.

    mp_rank_TT_model_states.pt, with ZeRO-3 zero_pp_rank_D_mp_rank_TT_model_states.pt
    [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt, none without ZeRO

Each rank writes its shards like a separate run. `universal_checkpoint_info.affine_map` in its model file records each
parameter's pieces: their places in the whole tensor and in the shard (deepspeed 0.19.8, checkpoint/affine.py,
`ParamAffineMap`; module_inject/layers.py, `collect_autotp_universal_checkpoint_info`). Tensors missing from the map,
such as buffers, are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.text import Brief, pluralize
from ckpt.containers.sources import RankFile, Sources
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key
from ckpt.plan.tensors import Box, Shape, Tensor, contiguous_strides, whole
from ckpt.state.skipped_states import Unread
from converters.deepspeed.folder import tensor_parallel
from converters.deepspeed.keys import UNIVERSAL_INFO
from converters.deepspeed.sharing import Cut, Sharing
from converters.deepspeed.sums import added_up
from converters.optimizers.ranks import check_same

_MAP_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankSlice:
    checkpoint: Checkpoint
    file: RankFile


def sharing_of(file: RankFile, ranks: Sequence[int], folders: Sequence[Path]) -> Sharing:
    """Return how ranks share tensors. GPT-NeoX needs the Hub's config in `folders`."""
    if "args" in file.content:  # GPT-NeoX's, or a user's entry
        from converters.deepspeed.neox import known_by_name  # late: needs pipelines and Megatron's names

        if known := known_by_name(file, ranks, folders):
            return known
    return recorded(file, ranks)


def together(slices: Sequence[RankSlice], sharing: Sharing, sources: Sources) -> Checkpoint:
    first = slices[0].checkpoint
    for other in slices[1:]:
        _check_alike(slices[0], other)
    check_same("step", [(each.file, each.file.content.get("global_steps")) for each in slices])
    dp = first.world_size or 1
    # In the engine's mesh these ranks are tp apart.
    ranks = [range(tp, dp * len(slices), len(slices)) for tp in range(len(slices))]
    computed: dict[str, Callable[[], memoryview]] = {}
    unread = Unread()
    tensors: dict[Key, Tensor] = {}
    for key in first.tensors:
        (fqn, role), cut = key, _recorded_cut(key, slices, sharing)
        if cut.is_added and role not in (WEIGHT, MASTER):
            unread.add(role, "ranks add up their parts, and its sum is unknown", [fqn])
            continue
        parts = [one.checkpoint.tensors[key] for one in slices]
        held = cut.check("a tensor parallel rank's", parts, [one.file.path for one in slices])
        if cut.is_added:
            tensors[key], found = added_up(held, slices[0].file.path)
            computed |= found
        else:
            joined = cut.joined(held, ranks)
            tensors[key] = joined.rank_local() if role == BUFFER else joined
    config = dict(first.state.ds_config or {})
    config.pop("tensor_parallel", None)  # the tensors are whole now
    quantized = next((method for each in slices for method in each.checkpoint.quantized.methods.values()), None)
    if quantized is not None:
        raise NotFoundError(
            f"quantized optimizer states on AutoTP ranks ({quantized}) are not supported",
            path=first.path,
        )
    _check_distinct(slices, sharing, sources)
    client = {**(first.state.client_state or {}), **sharing.client} or None
    note = Brief(f"parts from {len(slices)} tensor parallel ranks are joined {sharing.how}")
    return replace(
        first,
        tensors=tensors,
        files=tuple(file for each in slices for file in each.checkpoint.files),
        world_size=dp * len(slices),
        state=replace(first.state, ds_config=config or None, client_state=client),
        notes=(*first.notes, *sources.notes, note),
        computed=computed,
        unread=(*first.unread, *unread.sentences),
        lost_weights=next((lost for one in slices if (lost := one.checkpoint.lost_weights)), ""),
    )


def _check_alike(first: RankSlice, other: RankSlice) -> None:
    a, b = first.checkpoint, other.checkpoint
    told = (
        ("tensors", a.tensors.keys(), {key for key in b.tensors if key[0] not in a.ties}),  # only rank 0 records ties
        ("param groups", a.state.param_groups, b.state.param_groups),
        ("states of one number", a.state.scalars, b.state.scalars),
        ("data parallel ranks", a.world_size, b.world_size),
        ("ZeRO stage", a.state.zero_stage, b.state.zero_stage),
    )
    for what, ours, theirs in told:
        if ours != theirs:
            raise CorruptError(
                f"tensor parallel ranks have different {what}: are there files from different runs in one folder?",
                path=other.file.path,
                expected=f"as {first.file.path}",
            )


def _check_distinct(slices: Sequence[RankSlice], sharing: Sharing, sources: Sources) -> None:
    """Raise CorruptError for equal files if ranks hold different shards. Equal embedding shards are allowed."""
    own = {fqn for fqn, one in sharing.cuts.items() if not one.is_replicated}
    parts = (t for one in slices for (fqn, _), t in one.checkpoint.tensors.items() if fqn in own)
    with_own = {fragment.extent.path for part in parts for fragment in part.fragments()}
    sources.check_distinct((number, file) for number, file in enumerate(sources.storages) if file in with_own)


def _recorded_cut(key: Key, slices: Sequence[RankSlice], sharing: Sharing) -> Cut:
    fqn, role = key
    if role == BUFFER:
        shape = slices[0].checkpoint.tensors[key].shape
        return Cut(shape, (shape,) * len(slices), ((whole(shape),),) * len(slices))
    if fqn not in sharing.cuts:
        raise tensor_parallel(slices[0].file.path, f", without a record for {fqn}")
    return sharing.cuts[fqn]


def recorded(file: RankFile, ranks: Sequence[int]) -> Sharing:
    info = file.content.get(UNIVERSAL_INFO)
    affine = info.get("affine_map") if isinstance(info, Mapping) else None
    if not isinstance(affine, Mapping) or affine.get("version") != _MAP_VERSION:
        raise tensor_parallel(file.path)
    # The patterns are escaped full names.
    known = {f"^{re.escape(fqn)}$": fqn for fqn in file.need("module") if isinstance(fqn, str)}
    entries = {known[pattern]: entry for pattern, entry in affine["params"].items() if pattern in known}
    cuts = {fqn: cut_of(fqn, entry, ranks, file) for fqn, entry in entries.items()}
    return Sharing(file.path, len(ranks), cuts)


def cut_of(
    fqn: str,
    entry: Mapping[str, Any],
    found: Sequence[int],
    file: RankFile,
    unsupported: Callable[[str, str], NotFoundError] = tensor_parallel,
) -> Cut:
    """Return a parameter's cut. Raise `unsupported` if a shard is not a cut."""
    shape = tuple(entry["logical_shape"])
    ranks = {int(rank): one for rank, one in entry["ranks"].items()}
    if sorted(ranks) != list(found) or len(found) != found[-1] + 1:
        raise CorruptError(
            "the ranks sharing a parameter differ from the ranks with files",
            path=file.path,
            fqn=fqn,
            expected=f"ranks {', '.join(map(str, sorted(ranks)))}",
            found=f"files of ranks {', '.join(map(str, found))}",
        )
    shards = tuple(tuple(ranks[rank]["shard_shape"]) for rank in found)
    boxes = tuple(_boxes(fqn, ranks[rank]["pieces"], shape, shards[rank], file, unsupported) for rank in found)
    return Cut(shape, shards, boxes)


def _boxes(
    fqn: str,
    pieces: Sequence[Mapping[str, Any]],
    shape: Shape,
    shard: Shape,
    file: RankFile,
    unsupported: Callable[[str, str], NotFoundError],
) -> tuple[Box, ...]:
    """Return a rank's pieces as boxes: they must lie end to end."""
    found, at, strides = [], 0, contiguous_strides(shape)
    for piece in pieces:
        sizes, (start, steps) = tuple(piece["shape"]), piece["source"]
        place, inner = piece["dest"]
        follows = len(pieces) == 1 or sizes[1:] == shard[1:]
        is_box = len(sizes) == len(shape) and tuple(steps) == strides and place == at and follows
        if not is_box or tuple(inner) != contiguous_strides(shard) or piece.get("scale", 1.0) != 1.0:
            reason = "a bias divided by the number of ranks" if piece.get("scale", 1.0) != 1.0 else "fused parts"
            raise unsupported(file.path, f": {fqn} is not cut ({reason})")
        offsets = []
        for stride in strides:
            offset, start = divmod(start, stride) if stride else (0, start)
            offsets.append(offset)
        found.append(Box(tuple(offsets), sizes))
        at += prod(sizes)
    if at != prod(shard):
        raise CorruptError(
            "the pieces do not add up to a rank's part",
            path=file.path,
            fqn=fqn,
            expected=f"{pluralize(prod(shard), 'element')}",
            found=f"{pluralize(at, 'element')}",
        )
    return tuple(found)
