"""DeepSpeed's AutoEP: experts in a transformers model's MoE blocks, spread over expert-parallel ranks.

    layer_L_expert_E_mp_rank_00_model_states.pt

A rank holds a layer's experts in `{module}.experts.w1` to `w3`, with shape [experts, ...]. `ds_autoep_layers` in the
model files records them in AutoTP's form (`converters.deepspeed.autotp`). Under stages 0 to 2 each expert has its own
file, with E counting over all ranks, and each expert-parallel rank a flat buffer (`converters.deepspeed.sharing`).
Stage 3 has no such files: `ds_zero_partition_groups` in each rank's optimizer file records the ranks that share a
buffer.

The module also holds each layer's router under its name in transformers' block.

Format facts: deepspeed 0.19.8, runtime/engine.py (`_save_moe_checkpoint`), checkpoint/autoep_affine.py,
runtime/zero/stage3.py (`_zero3_partition_group_metadata`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import WEIGHT, Key
from ckpt.plan.tensors import Box, Fragment, Pieces, Shape, Tensor
from converters.deepspeed.autotp import cut_of
from converters.deepspeed.experts import Files, check_files, entries_of, is_in_rows, read_experts
from converters.deepspeed.folder import experts_unsupported
from converters.deepspeed.keys import AUTOEP
from converters.deepspeed.sharing import Cut, Sharing

_MAP_VERSION = 1
_MATRICES = ("w1", "w2", "w3")


def routers(model: RankFile, module: Mapping[str, StoredTensor]) -> dict[str, str]:
    found: dict[str, str] = {}
    for layer in model.content.get(AUTOEP) or ():
        path = layer["module_path"] + "."
        children: dict[str, dict[str, StoredTensor]] = {}
        for fqn, stored in module.items():
            if fqn.startswith(path):
                child, _, rest = fqn.removeprefix(path).partition(".")
                children.setdefault(child, {})[rest] = stored
        router = children.pop("router", {})
        for child, entries in children.items():
            kinds = [{n: (t.extent.shape, t.extent.dtype) for n, t in one.items()} for one in (entries, router)]
            if kinds[0] == kinds[1]:
                found |= {f"{path}{child}.{rest}": f"{path}router.{rest}" for rest in entries}
    return found


def experts_of(files: Files, model: RankFile, sources: Sources) -> tuple[Sharing, dict[Key, Tensor]]:
    if not model.content.get(AUTOEP):
        return read_experts(files, model, sources)
    sharing = recorded(model)
    _, wanted = check_files(files, model)
    fragments: dict[str, list[Fragment]] = {fqn: [] for fqn in sharing.cuts}
    names = list(sharing.cuts)
    for layer, expert in wanted:
        path = files[layer, expert]
        content = dict(entries_of(sources.root(path, is_named=True), path))
        expected = {f"{fqn}.{expert}": fqn for fqn in names[layer * len(_MATRICES) :][: len(_MATRICES)]}
        if content.keys() != expected.keys():
            raise CorruptError(
                "an expert file does not match the matrices in its layer",
                path=path,
                expected=", ".join(expected),
                found=", ".join(map(str, content)) or "nothing",
            )
        for name, fqn in expected.items():
            fragments[fqn].append(_expert_fragment(content[name], expert, sharing.cuts[fqn].shape, fqn, path))
    tensors: dict[Key, Tensor] = {}
    for fqn, held in fragments.items():
        dtypes = {fragment.extent.dtype for fragment in held}
        if len(dtypes) != 1:
            raise CorruptError("experts in one layer have different dtypes", path=model.path, fqn=fqn)
        (dtype,) = dtypes
        tensors[fqn, WEIGHT] = Tensor(fqn, WEIGHT, dtype, sharing.cuts[fqn].shape, Pieces(tuple(held)), dtype)
    return sharing, tensors


def _expert_fragment(stored: Any, expert: int, shape: Shape, fqn: str, path: str) -> Fragment:
    if not isinstance(stored, StoredTensor) or stored.extent.shape != shape[1:] or not stored.extent.is_contiguous:
        raise CorruptError(
            "an expert's matrix does not match its record",
            path=path,
            fqn=fqn,
            expected=list(shape[1:]),
            found=list(stored.extent.shape) if isinstance(stored, StoredTensor) else type(stored).__name__,
        )
    sizes = (1, *shape[1:])
    return Fragment(Box((expert, *(0,) * (len(shape) - 1)), sizes), stored.extent.reshape(sizes))


def recorded(model: RankFile) -> Sharing:
    layers: Sequence[Mapping[str, Any]] = model.need(AUTOEP)
    if "folding" in model.content:
        raise experts_unsupported(model.path, " (AutoEP) with tensor parallelism")
    if [layer.get("num_experts") for layer in layers] != list(model.content.get("num_experts") or []):
        raise experts_unsupported(model.path, " (AutoEP) in only some layers")
    sizes = {layer["ep_size"] for layer in layers}
    if len(sizes) != 1:
        raise experts_unsupported(model.path, " (AutoEP) with other settings in each layer")
    (num_ranks,) = sizes
    cuts: dict[str, Cut] = {}
    for number, layer in enumerate(layers):
        names = [f"{layer['expert_key_prefix']}.{matrix}" for matrix in _MATRICES]
        affine = layer.get("affine_maps") or {}
        if affine.get("version") != _MAP_VERSION:
            raise experts_unsupported(model.path, " (AutoEP) without a known sharding record")
        entries = affine["params"]
        if layer["moe_layer_id"] != number or sorted(entries) != names or any(fqn in cuts for fqn in names):
            raise CorruptError(
                "the records disagree about a layer's experts",
                path=model.path,
                fqn=layer["module_path"],
                expected=f"layer {number}: {', '.join(names)}",
                found=f"layer {layer['moe_layer_id']}: {', '.join(entries)}",
            )
        for fqn in names:
            cuts[fqn] = cut_of(fqn, entries[fqn], range(num_ranks), model, experts_unsupported)
            _check_in_order(fqn, cuts[fqn], layer["num_experts"], num_ranks, model)
    return Sharing(model.path, num_ranks, cuts, is_in_rows=is_in_rows(model.content.get("ds_config")))


def _check_in_order(fqn: str, known: Cut, num_experts: int, num_ranks: int, model: RankFile) -> None:
    each, rest = divmod(num_experts, num_ranks)
    sizes = (each, *known.shape[1:])
    boxes = tuple((Box((rank * each, *(0,) * (len(sizes) - 1)), sizes),) for rank in range(num_ranks))
    if rest or len(known.shape) != 3 or known.shape[0] != num_experts or known.boxes != boxes:
        raise experts_unsupported(model.path, f" (AutoEP) in another order ({fqn})")


def sharing_under_stage3(models: Sequence[RankFile], inners: Sequence[RankFile]) -> Sharing:
    file = models[0]
    if not file.content.get(AUTOEP):
        if inners[0].content.get("ds_zero_partition_groups"):
            raise experts_unsupported(inners[0].path, " (AutoEP)")
        return Sharing(file.path)
    known = recorded(file)
    for model in models[1:]:
        other = recorded(model)
        if (other.num_ranks, other.cuts) != (known.num_ranks, known.cuts):
            raise CorruptError("ranks describe different experts", **model.where, expected=f"as {file.path}")
    return known


def sharers_under_stage3(
    sharing: Sharing,
    models: Sequence[RankFile],
    inners: Sequence[RankFile],
    number: int,
    shapes: Mapping[str, Shape],
) -> list[tuple[int, ...]]:
    """Return ranks that share a sub-group's buffers: all, or a tuple per expert-parallel rank."""
    world = tuple(range(len(inners)))
    if not sharing.cuts:
        return [world]
    said = [inner.need("ds_zero_partition_groups")[number] for inner in inners]
    groups = [tuple(one["partition_ranks"]) for one in said]
    for rank, (one, ranks) in enumerate(zip(said, groups, strict=True)):
        place = ranks.index(rank) if rank in ranks else None
        same = place is not None and all(other in world and groups[other] == ranks for other in ranks)
        if not same or (one["partition_rank"], one["partition_count"]) != (place, len(ranks)):
            raise CorruptError(
                f"ranks disagree about the group for sub-group {number}",
                path=inners[rank].path,
                rank=rank,
                found=f"ranks {', '.join(map(str, ranks))}",
            )
    if not any(map(sharing.is_shared, shapes)) and set(groups) == {world}:
        return [world]
    own = [{layer["ep_rank"] for layer in model.need(AUTOEP)} for model in models]
    by_expert_rank = {frozenset(own[rank]): ranks for rank, ranks in enumerate(groups)}
    expected = [frozenset({rank}) for rank in range(sharing.num_ranks)]
    alike = all(own[other] == own[rank] for rank, ranks in enumerate(groups) for other in ranks)
    if not alike or set(by_expert_rank) != set(expected) or len(set(groups)) != sharing.num_ranks:
        raise CorruptError(
            "the expert parallel ranks differ from the ranks sharing experts",
            path=inners[0].path,
            expected=f"{pluralize(sharing.num_ranks, 'group')} of ranks in sub-group {number}",
            found="; ".join(f"{sorted(one)}: ranks {list(ranks)}" for one, ranks in by_expert_rank.items()),
        )
    if sharing.num_ranks > 1:
        sharing.check_buffer(shapes, 1, sharing.num_ranks)
    return [by_expert_rank[one] for one in expected]
