"""DeepSpeed's AutoEP: the experts of a transformers model's MoE blocks, which expert parallel ranks share.

    layer_L_expert_E_mp_rank_00_model_states.pt

A rank has the experts of a layer in three tensors, `{module}.experts.w1` to `w3`, of [experts, ...].  Which of the
layer's experts these are is recorded in the model files, for each layer and tensor: `ds_autoep_layers`, in the way in
which AutoTP records it (`converters.deepspeed.autotp`).  Under stages 0 to 2 each expert's matrices are in a file of
their own, E counting on from rank to rank; the optimizer has flat buffers for what one expert parallel rank has, which
the same data parallel ranks share as with DeepSpeed-MoE (`converters.deepspeed.experts`).  Under stage 3 there are no
such files, and each rank's optimizer file says which ranks share a buffer, `ds_zero_partition_groups`.

A layer's router is in the module a second time, under the name that transformers' block has for it.

Format facts are from deepspeed 0.19.8: runtime/engine.py (`_save_moe_checkpoint`), checkpoint/autoep_affine.py,
runtime/zero/stage3.py (`_zero3_partition_group_metadata`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import WEIGHT, Key
from ckpt.plan.tensors import Box, Fragment, Pieces, Shape, Tensor
from converters.deepspeed.autotp import Map, check_parts, map_of
from converters.deepspeed.experts import Experts, Files, check_files, entries_of, read_experts, sharing_ranks
from converters.deepspeed.folder import experts_unsupported
from converters.deepspeed.keys import AUTOEP
from converters.deepspeed.parts import Joined, Part

_MAP_VERSION = 1
_MATRICES = ("w1", "w2", "w3")


@dataclass(frozen=True)
class AutoExperts:
    """The experts of a model under AutoEP: how `num_ranks` expert parallel ranks share each tensor, by its name.

    `tensors` are the weights of experts' files.
    """

    model: RankFile
    num_ranks: int
    maps: Mapping[str, Map]
    tensors: Mapping[Key, Tensor]

    def tied(self, module: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Entries of the module dict that are a router's again, by the names that these have in `router`."""
        found: dict[str, str] = {}
        for layer in self.model.need(AUTOEP):
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

    def in_order(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Names of a param group's parameters as the model registers them, each once."""
        return tuple(dict.fromkeys(fqns))

    def shared(
        self, shapes: Mapping[str, Shape], count: int, num_ranks: int
    ) -> Iterator[tuple[range, dict[str, Shape]]]:
        """The ranks that share a flat buffer of a param group, and its parameters; as of other experts."""
        if self._is_of_none(shapes) and count == num_ranks:
            yield range(num_ranks), dict(shapes)
            return
        self.check_local(shapes, count * self.num_ranks == num_ranks)
        for rank in range(self.num_ranks):
            local = {fqn: self.maps[fqn].shards[rank] for fqn in shapes}
            yield sharing_ranks(rank, count, num_ranks, self.model), local

    def check_local(self, shapes: Mapping[str, Shape], is_whole_group: bool = True) -> None:
        """Refuse a flat buffer that is not of experts alone, or of which ranks have other parts than is recorded."""
        if not is_whole_group or not all(fqn in self.maps for fqn in shapes):
            raise experts_unsupported(self.model.path, " (AutoEP) and of which a param group has others beside them")
        for fqn, shape in shapes.items():
            if shape not in self.maps[fqn].shards:
                raise CorruptError(
                    "an expert parallel rank's part is not as it is recorded",
                    path=self.model.path,
                    fqn=fqn,
                    expected=list(self.maps[fqn].shards[0]),
                    found=list(shape),
                )

    def _is_of_none(self, shapes: Iterable[str]) -> bool:
        return not any(fqn in self.maps for fqn in shapes)

    def together(self, parts: Sequence[Mapping[Key, Tensor]], ranks: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """The tensors of which expert parallel ranks have `parts`, by data parallel ranks.

        Fragments of a part name their rank by its place in `ranks`.
        """
        if len(parts) == 1 and self._is_of_none(fqn for fqn, _ in parts[0]):
            yield from parts[0].values()
            return
        for key, first in parts[0].items():
            known = self.maps[key[0]]
            held = [part.get(key) for part in parts]
            check_parts("an expert parallel rank's", held, known, [self.model.path] * len(held))
            whole = [
                Part(one.shape, boxes, one.source, own)
                for one, boxes, own in zip(held, known.boxes, ranks, strict=True)
                if one is not None
            ]
            yield replace(first, shape=known.shape, source=Joined(tuple(whole)))

    def held_by(self, rank: int | None, num_ranks: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """What of `shapes`, those of the whole model, is of experts that an expert parallel rank has; None: of none."""
        if rank is None:
            return {fqn: shape for fqn, shape in shapes.items() if fqn not in self.maps}
        return {fqn: self.maps[fqn].shards[rank] for fqn in shapes if fqn in self.maps}


def experts_of(files: Files, model: RankFile, sources: Sources) -> Experts | AutoExperts:
    """The experts of a model, AutoEP's or those of DeepSpeed's MoE layers, of which a step's folder has `files`.

    Raises NotFoundError for AutoEP's that are not read, IncompleteError where an expert's file is missing, CorruptError
    where one holds something else.
    """
    if not model.content.get(AUTOEP):
        return read_experts(files, model, sources)
    num_ranks, maps = recorded_experts(model)
    _, wanted = check_files(files, model)
    fragments: dict[str, list[Fragment]] = {fqn: [] for fqn in maps}
    names = list(maps)
    for layer, expert in wanted:
        path = files[layer, expert]
        content = dict(entries_of(sources.root(path, is_named=True), path))
        expected = {f"{fqn}.{expert}": fqn for fqn in names[layer * len(_MATRICES) :][: len(_MATRICES)]}
        if content.keys() != expected.keys():
            raise CorruptError(
                "an expert's file does not hold the matrices of an expert of its layer",
                path=path,
                expected=", ".join(expected),
                found=", ".join(map(str, content)) or "nothing",
            )
        for name, fqn in expected.items():
            fragments[fqn].append(_of_expert(content[name], expert, maps[fqn].shape, fqn, path))
    tensors: dict[Key, Tensor] = {}
    for fqn, held in fragments.items():
        dtypes = {fragment.extent.dtype for fragment in held}
        if len(dtypes) != 1:
            raise CorruptError("experts of a layer have different dtypes", path=model.path, fqn=fqn)
        (dtype,) = dtypes
        tensors[fqn, WEIGHT] = Tensor(fqn, WEIGHT, dtype, maps[fqn].shape, Pieces(tuple(held)), dtype)
    return AutoExperts(model, num_ranks, maps, tensors)


def _of_expert(stored: Any, expert: int, shape: Shape, fqn: str, path: str) -> Fragment:
    if not isinstance(stored, StoredTensor) or stored.extent.shape != shape[1:] or not stored.extent.is_contiguous:
        raise CorruptError(
            "an expert's matrix is not as it is recorded",
            path=path,
            fqn=fqn,
            expected=list(shape[1:]),
            found=list(stored.extent.shape) if isinstance(stored, StoredTensor) else type(stored).__name__,
        )
    sizes = (1, *shape[1:])
    return Fragment(Box((expert, *(0,) * (len(shape) - 1)), sizes), stored.extent.reshape(sizes))


def recorded_experts(model: RankFile) -> tuple[int, dict[str, Map]]:
    """The number of expert parallel ranks, and how they share each tensor of experts, in the order of layers.

    Raises NotFoundError where experts are not dealt to ranks in order, or not all layers are AutoEP's, CorruptError
    where what is recorded of a layer does not agree.
    """
    layers: Sequence[Mapping[str, Any]] = model.need(AUTOEP)
    if "folding" in model.content:
        raise experts_unsupported(model.path, " (AutoEP) that are tensor parallel, too")
    if [layer.get("num_experts") for layer in layers] != list(model.content.get("num_experts") or []):
        raise experts_unsupported(model.path, " (AutoEP) in some of its layers")
    sizes = {layer["ep_size"] for layer in layers}
    if len(sizes) != 1:
        raise experts_unsupported(model.path, " (AutoEP) in another way in each layer")
    (num_ranks,) = sizes
    maps: dict[str, Map] = {}
    for number, layer in enumerate(layers):
        names = [f"{layer['expert_key_prefix']}.{matrix}" for matrix in _MATRICES]
        recorded = layer.get("affine_maps") or {}
        if recorded.get("version") != _MAP_VERSION:
            raise experts_unsupported(model.path, " (AutoEP), and not how ranks share them")
        entries = recorded["params"]
        if layer["moe_layer_id"] != number or sorted(entries) != names or any(fqn in maps for fqn in names):
            raise CorruptError(
                "what is recorded of a layer's experts does not agree",
                path=model.path,
                fqn=layer["module_path"],
                expected=f"layer {number}: {', '.join(names)}",
                found=f"layer {layer['moe_layer_id']}: {', '.join(entries)}",
            )
        for fqn in names:
            maps[fqn] = map_of(fqn, entries[fqn], range(num_ranks), model, experts_unsupported)
            _check_in_order(fqn, maps[fqn], layer["num_experts"], num_ranks, model)
    return num_ranks, maps


def _check_in_order(fqn: str, known: Map, num_experts: int, num_ranks: int, model: RankFile) -> None:
    """Files count experts on from rank to rank, whatever is recorded: only where it is the same are they known."""
    each, rest = divmod(num_experts, num_ranks)
    sizes = (each, *known.shape[1:])
    boxes = tuple((Box((rank * each, *(0,) * (len(sizes) - 1)), sizes),) for rank in range(num_ranks))
    if rest or len(known.shape) != 3 or known.shape[0] != num_experts or known.boxes != boxes:
        raise experts_unsupported(model.path, f" (AutoEP) in another order than theirs ({fqn})")


def sharing_under_stage3(
    experts: AutoExperts, models: Sequence[RankFile], inners: Sequence[RankFile], number: int, fqns: Sequence[str]
) -> list[tuple[int, ...]]:
    """The ranks that share the buffers of a sub-group, as they record it: all, or those of each expert parallel rank.

    CorruptError where they do not agree on it.
    """
    world = tuple(range(len(inners)))
    said = [inner.need("ds_zero_partition_groups")[number] for inner in inners]
    groups = [tuple(one["partition_ranks"]) for one in said]
    for rank, (one, ranks) in enumerate(zip(said, groups, strict=True)):
        place = ranks.index(rank) if rank in ranks else None
        same = place is not None and all(other in world and groups[other] == ranks for other in ranks)
        if not same or (one["partition_rank"], one["partition_count"]) != (place, len(ranks)):
            raise CorruptError(
                f"ranks do not agree on which of them share sub-group {number}",
                path=inners[rank].path,
                rank=rank,
                found=f"ranks {', '.join(map(str, ranks))}",
            )
    if not any(fqn in experts.maps for fqn in fqns) and set(groups) == {world}:
        return [world]
    own = [{layer["ep_rank"] for layer in model.need(AUTOEP)} for model in models]
    by_expert_rank = {frozenset(own[rank]): ranks for rank, ranks in enumerate(groups)}
    expected = [frozenset({rank}) for rank in range(experts.num_ranks)]
    alike = all(own[other] == own[rank] for rank, ranks in enumerate(groups) for other in ranks)
    if not alike or set(by_expert_rank) != set(expected) or len(set(groups)) != experts.num_ranks:
        raise CorruptError(
            "expert parallel ranks are not those that share experts",
            path=inners[0].path,
            expected=f"{experts.num_ranks} groups of ranks in sub-group {number}",
            found="; ".join(f"{sorted(one)}: ranks {list(ranks)}" for one, ranks in by_expert_rank.items()),
        )
    return [by_expert_rank[one] for one in expected]
