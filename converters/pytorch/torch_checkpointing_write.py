"""Writer of torch_checkpointing's folder, as its `save` leaves it after FSDP2 on one mesh.

    ITEM_RANK.pt     model, optimizer: a DTensor per parameter and state, cut on dim 0 over all ranks; other tensors are
                     whole on every rank. Other items: the value, the same on every rank or each rank's own
    metadata.pkl     for each tensor of model and optimizer: shape, mesh, placements

The optimizer has the form of `optimizer_transform_pre`, or torch's flattened form, as torchtitan saves it.

Format facts: torch_checkpointing 0.1.1 (distributed_metadata.py, dtensor_metadata.py, default_resharder.py,
state_transformations.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt.base.text import Brief, pluralize
from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.dcp.nested import nest
from ckpt.containers.dcp.write import Alias, SourceTensor, flatten
from ckpt.containers.torchfile.pickler import dumps
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.containers.torchfile.write import FromSource, NewTensor, torch_file
from ckpt.plan.checkpoint import Checkpoint, Layout, Target, TargetFile
from ckpt.plan.tensors import contiguous_strides, whole
from ckpt.runs.model_files import run_files_left_out
from ckpt.runs.steps import RANK_FILE, RANKS_METADATA
from ckpt.runs.trainer_files import model_files
from converters.names.options import NameOptions
from converters.optimizers.state_dicts import GROUPS, MEMBERS, NAMES, VERSION
from converters.optimizers.states import check_can_be_read
from converters.pytorch.dcp import placed
from converters.pytorch.dtensors import DTensors, form_note
from converters.pytorch.facts import TorchFacts
from converters.pytorch.ranks_options import MeshOptions
from converters.pytorch.state import state_dict

_Leaves = dict[Path_, Any]


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    check_can_be_read(checkpoint)
    num_ranks = layout.num_ranks(checkpoint)
    facts = checkpoint.facts_of(TorchFacts)
    state = state_dict(checkpoint, layout.dtype, flat_optimizer=layout.read(NameOptions).flat_optimizer)
    optimizer = [*state.optimizer, *flatten(state.entries.get("optimizer", {}), ("optimizer",))]
    model = placed(_in_item(state.model), facts.model_at or ("model",))
    described = _by_item((*model, *placed(_as_saved(optimizer), facts.optimizer_at)))
    others, dropped = _others(checkpoint, state.entries, described, num_ranks)
    meshes = [
        DTensors(facts.dtensor, layout.read(MeshOptions).mesh_device, num_ranks, rank) for rank in range(num_ranks)
    ]
    files, notes = model_files(checkpoint, layout.dtype)
    for name, leaves in described.items():
        files += [torch_file(f"{name}_{rank}.pt", _rank_values(leaves, mesh)) for rank, mesh in enumerate(meshes)]
    for name, values in others.items():
        files += [torch_file(f"{name}_{rank}.pt", value) for rank, value in enumerate(values)]
    metadata = {
        "metadata": {name: _item_metadata(leaves, meshes[0], num_ranks) for name, leaves in described.items()},
        "world_size": num_ranks,
        "version": "2.0",
    }
    files.append(TargetFile.of_bytes(RANKS_METADATA, dumps(metadata, protocol=4)))
    return Target(
        files=tuple(files),
        dropped=(*state.dropped, *dropped, *run_files_left_out(checkpoint)),
        notes=(*state.notes, *_mesh_notes(checkpoint, meshes), *notes),
    )


def _mesh_notes(checkpoint: Checkpoint, meshes: Sequence[DTensors]) -> Iterator[str]:
    before = checkpoint.world_size
    changed = f", from {before}" if before not in (None, len(meshes)) else ""
    yield Brief(f"FSDP2 on {pluralize(len(meshes), 'rank')}{changed}")
    if checkpoint.state.param_groups:
        name = f"({meshes[0].axes[0]!r},)" if meshes[0].axes else "None"
        yield (
            f"torch_checkpointing loads lr and other options of param groups only onto this mesh: {meshes[0].device}, "
            f"({len(meshes)},), mesh_dim_names={name}; on another it keeps the new run's options"
        )
    if (note := form_note(checkpoint.facts_of(TorchFacts).dtensor)) is not None:
        yield note


def _in_item(entries: Iterable[tuple[Path_, Any]]) -> Iterator[tuple[Path_, Any]]:
    """Yield torchtitan's model, which DCP has at the top, in the item that torchtitan gives it here."""
    for path, value in entries:
        yield ("model", path[-1]), Alias(("model", value.path[-1])) if isinstance(value, Alias) else value


def _as_saved(entries: Iterable[tuple[Path_, Any]]) -> Iterator[tuple[Path_, Any]]:
    """Yield the optimizer's entries: flattened with one key each, or with names in place of numbers."""
    listed = list(entries)
    if any(str(path[1]).startswith(f"{GROUPS}.") for path, _ in listed):
        yield from (((path[0], ".".join(map(str, path[1:]))), value) for path, value in listed)
        return
    for path, value in listed:
        is_members = path[1] == GROUPS and path[3:] == (MEMBERS,)
        if path[1] != GROUPS or path[3:] != (NAMES,):
            yield ((*path[:3], NAMES) if is_members else path), value
    if listed:
        yield ("optimizer", VERSION), 1


def _by_item(entries: Iterable[tuple[Path_, Any]]) -> dict[str, _Leaves]:
    found: dict[str, _Leaves] = {}
    known: _Leaves = {}
    for path, value in entries:
        known[path] = known[value.path] if isinstance(value, Alias) else value
        found.setdefault(str(path[0]), {})[path[1:]] = known[path]
    return found


def _others(
    checkpoint: Checkpoint, entries: Mapping[str, Any], described: Mapping[str, _Leaves], num_ranks: int
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return items without metadata by rank, and what has no place."""
    found: dict[str, list[Any]] = {}
    dropped = []
    ranks = [str(rank) for rank in range(num_ranks)]
    for name, value in entries.items():
        of_ranks = checkpoint.state.per_rank.get(name)
        if name in described:
            continue
        if "/" in name or not RANK_FILE.fullmatch(f"{name}_0.pt"):
            dropped.append(f"training state {name}: no file can have this name")
        elif of_ranks is None:
            found[name] = [value] * num_ranks
        elif sorted(of_ranks) == sorted(ranks):
            found[name] = [of_ranks[rank] for rank in ranks]
        else:
            dropped.append(f"training state {name} of {pluralize(len(of_ranks), 'rank')}: the number of ranks changed")
    return found, dropped


def _rank_values(leaves: _Leaves, mesh: DTensors) -> dict[str | int, Any]:
    written: dict[int, Any] = {}  # tied names share one tensor
    content = []
    for path, value in leaves.items():
        if isinstance(value, SourceTensor):
            value = written.setdefault(id(value), _part(value, mesh))
        content.append((path, value))
    return nest(content, RANKS_METADATA)


def _part(tensor: SourceTensor, mesh: DTensors) -> Any:
    if _is_cut(tensor):
        return mesh.part_of(tensor.key, tensor.dtype, tensor.shape)
    return NewTensor(tensor.dtype, tensor.shape, (FromSource(tensor.key, whole(tensor.shape)),))


def _is_cut(value: SourceTensor | NewTensor | StoredTensor) -> bool:
    return isinstance(value, SourceTensor) and value.cut and bool(value.shape)


def _item_metadata(leaves: _Leaves, mesh: DTensors, num_ranks: int) -> dict[str, Any]:
    ranks = tuple(range(num_ranks))
    places: dict[str, list[dict[str, Any]]] = {}
    for path, value in leaves.items():
        if not isinstance(value, SourceTensor | NewTensor | StoredTensor):
            continue
        is_cut = _is_cut(value)
        said = {
            "global_shape": list(value.shape),
            "dtype": f"torch.{value.dtype.name}",
            "stride": list(contiguous_strides(value.shape)),
            "mesh_spec": {
                "device_type": mesh.device,
                "mesh_shape": (num_ranks,),
                "mesh_data": ranks,
                "mesh_dim_names": mesh.axes if is_cut else None,
            },
            "placements": [{"type": "Shard", "dim": 0} if is_cut else {"type": "Replicate"}],
        }
        place = {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": said}, "ranks": ranks}
        places[json.dumps(path, separators=(",", ":"))] = [place]
    return {"nested_path_to_metadata": places, "rank_to_layout_info": dict.fromkeys(ranks)}
