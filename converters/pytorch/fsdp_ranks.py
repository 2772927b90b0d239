"""One torch file per rank, with the rank's part of each tensor (DTensor, ShardedTensor).

    model_world_size_W_rank_R.pt, optim_..., extra_state_...    verl: global_step_N/actor; read and written
    pytorch_model_fsdp_0_rankR.bin, optimizer_0_rankR.bin       Accelerate with use_dcp=False; read
    pytorch_model_fsdp_1_rankR.bin, optimizer_1_rankR.bin       the second model in such a save

A part records its box in the tensor. FSDP1's ShardedTensor has offsets and sizes. FSDP2's DTensor has the mesh, the
rank's coordinate, and a placement per axis. Several ranks with the same box are replicas.

`optim_` files number the states, and no file has the names. verl's sources define the order (workers/fsdp_workers.py:
`AdamW(module.parameters())`, up to 0.9): one param group in the model file's order, tied parameters once. This order is
used if all numbers and shapes agree, and recorded names are used if present. Otherwise the states are left out, with a
note. Under FSDP1 a state is the rank's flattened slice of the parameter, in rank order, or a slice of a flat parameter
(`converters.pytorch.flat_parameters`).

Format facts: torch 2.13 (distributed/tensor/_utils.py, placement_types.py, device_mesh.py, _mesh_layout.py;
distributed/_shard/sharded_tensor/api.py; distributed/fsdp/_flat_param.py), verl 0.9.1
(utils/checkpoint/fsdp_checkpoint_manager.py), accelerate 1.15 (utils/fsdp_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, structure
from ckpt.containers.torchfile.values import Record, StoredTensor, is_part
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import names_in
from ckpt.plan.assemble import assemble
from ckpt.plan.checkpoint import (
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Layout,
    QuantizedStates,
    ReadRequest,
    Target,
)
from ckpt.plan.tensors import Box, Extent, Shape, Tensor, whole
from ckpt.runs.finding import Steps, find_step, number_of
from ckpt.runs.half_checkpoints import optimizer_alone
from ckpt.runs.model_files import read_config
from ckpt.runs.steps import TRACKER
from ckpt.state.naming import clean_names
from converters.optimizers.ranks import check_same_counts, check_same_options, different_numbers
from converters.optimizers.state_dicts import Optimizer, read_optimizer, take_apart
from converters.optimizers.states import OptimizerStates
from converters.pytorch.facts import TorchFacts
from converters.pytorch.flat_parameters import Units, in_turn, read_flat
from converters.pytorch.folder import is_local
from converters.pytorch.rank_parts import local_extent, part, parts_of, placed
from converters.pytorch.state_dicts import Reading, tie_as_declared

#: (kind, pattern). Groups: the rank, and the number of ranks (verl) or the model's number (Accelerate).
_FILES = (
    ("model", re.compile(r"model_world_size_(?P<ranks>\d+)_rank_(?P<rank>\d+)\.pt")),
    ("optim", re.compile(r"optim_world_size_(?P<ranks>\d+)_rank_(?P<rank>\d+)\.pt")),
    ("extra", re.compile(r"extra_state_world_size_(?P<ranks>\d+)_rank_(?P<rank>\d+)\.pt")),
    ("model", re.compile(r"pytorch_model_fsdp_(?P<model>\d+)_rank(?P<rank>\d+)\.bin")),
    ("optim", re.compile(r"optimizer_(?P<model>\d+)_rank(?P<rank>\d+)\.bin")),
)
_FLAT_PARAM = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?")


class FsdpRanks(Format):
    name = "fsdp-ranks"
    title = "per-rank files of FSDP (verl)"
    namespace = TRANSFORMERS
    carries_blocks = True
    fits_other_ranks = False
    takes = ("world_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Find `path`, verl's `actor` in a step, or the step named by verl's tracker.

        Also accept the first rank's file of one of several models.
        """
        if path.is_file():
            return path if _match(path.name, number_of(path)) and not is_local(path.parent) else None
        found = find_step(path, tag, _STEPS)
        return None if found is None else _inside(found)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Give every tensor of the model the role `weight`."""
        folder = path.parent if path.is_file() else path
        reading = Reading(folder)
        files = _list(folder, number_of(path) or 0)

        def of(kind: str) -> list[RankFile]:
            return [reading.sources.of_rank(file, rank, "state dict") for rank, file in sorted(files[kind].items())]

        models = of("model")
        if not models:
            raise optimizer_alone(path)
        _refuse_flat(models)
        places = (request.config, folder / "huggingface", folder, folder.parent)
        folders = tuple(place for place in places if place and place.is_dir())
        config = read_config(folders)
        parameters = _read_models(reading, models)
        # FSDP1 saves each name separately.
        tie_as_declared(reading.tensors, reading.ties, config)
        units: Units = ()
        if optimizers := of("optim"):
            units = _read_optimizers(reading, optimizers, parameters)
        _read_extras(reading, of("extra"))
        step = next((int(m[1]) for p in (folder, folder.parent) if (m := re.search(r"step[-_](\d+)$", p.name))), None)
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=reading.tensors,
            files=reading.sources.files,
            framework="verl" if "huggingface" in {p.name for p in folders} else None,
            world_size=len(models),
            facts=TorchFacts(
                dtensor=next(
                    (v for v in models[0].content.values() if isinstance(v, Record) and v.name == "DTensor"), None
                ),
                flat_parameters=units,
            ),
            ties=reading.ties,
            state=reading.state(step),
            config=config,
            folders=tuple(map(str, folders)),
            notes=(*reading.notes, *reading.sources.notes),
            computed=reading.states.computed,
            quantized=QuantizedStates(reading.states.quantized, reading.states.blocks),
            unread=reading.states.left_out(),
            unmapped_optimizer=reading.unmapped,
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        from converters.pytorch.fsdp_ranks_write import lay_out  # late: faster start

        return lay_out(checkpoint, layout)


FSDP_RANKS = FsdpRanks()


# -- files ---------------------------------------------------------------------------------------------------


def _inside(folder: Path) -> Path | None:
    """Return `folder`, or verl's `actor` or `critic` in it."""
    for one in (folder, folder / "actor", folder / "critic"):
        if one.is_dir() and any((file := _match(name)) and file[0] != "extra" for name in names_in(one)):
            return one
    return None


_STEPS = Steps(
    lambda folder: _inside(folder) is not None,
    record=TRACKER,
    of_record=lambda said: (f"global_step_{said}",),
)


def _match(name: str, number: int | None = 0) -> tuple[str, re.Match[str]] | None:
    found = ((kind, match) for kind, pattern in _FILES if (match := pattern.fullmatch(name)))
    return next((one for one in found if int(one[1].groupdict().get("model", 0)) == number), None)


def _list(folder: Path, number: int) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {kind: {} for kind, _ in _FILES}
    stated: dict[int, str] = {}
    for name in names_in(folder):
        if one := _match(name, number):
            kind, match = one
            found[kind][int(match["rank"])] = str(confined(folder, name))
            if "ranks" in match.groupdict():
                stated.setdefault(int(match["ranks"]), name)
    _check_ranks(folder, found, stated)
    return found


def _check_ranks(folder: Path, found: Mapping[str, Mapping[int, str]], stated: dict[int, str]) -> None:
    config = folder / "fsdp_config.json"
    if config.is_file():
        content = read_json(confined(folder, config.name))
        recorded = content.get("world_size") if isinstance(content, dict) else None
        if type(recorded) is int:
            stated.setdefault(recorded, config.name)
    if len(stated) > 1:
        raise CorruptError(
            "the folder mixes runs with different numbers of ranks",
            path=folder,
            found=", ".join(f"{pluralize(count, 'rank')}: {name}" for count, name in sorted(stated.items())),
            hint="move the files from other runs out of the folder",
        )
    world_size = next(iter(stated), len(found["model"]))
    for kind in ("model", "optim", "extra"):
        ranks = found[kind]
        missing = [rank for rank in range(max(world_size, max(ranks, default=-1) + 1)) if rank not in ranks]
        if ranks and (missing or len(ranks) != world_size):
            raise IncompleteError(
                f"rank files are missing: each has a part of every tensor ({kind})",
                path=folder,
                rank=", ".join(map(str, missing[:16])),
                expected=f"{pluralize(max(world_size, len(ranks) + len(missing)), 'file')}",
                found=f"{pluralize(len(ranks), 'file')}, such as {Path(next(iter(ranks.values()))).name}",
            )


def _refuse_flat(models: list[RankFile]) -> None:
    for model in models:
        if any(isinstance(name, str) and _FLAT_PARAM.fullmatch(name) for name in model.content):
            raise NotFoundError(
                "FSDP1 flat parameters (LOCAL_STATE_DICT) need Accelerate's file names, not verl's",
                path=model.path,
                hint="rename it to Accelerate's name, pytorch_model_fsdp_rank0.bin",
            )


# -- model ---------------------------------------------------------------------------------------------------


def _read_models(reading: Reading, models: list[RankFile]) -> dict[str, Shape]:
    """Return the shapes of sharded tensors; buffers are never sharded."""
    first = models[0]
    names = clean_names(first.content, first.path)
    for model in models[1:]:
        if set(model.content) != set(first.content):
            odd = min(map(str, set(model.content) ^ set(first.content)))
            raise CorruptError("ranks store different tensors", **model.where, fqn=odd, expected=first.path)
    extra: dict[str, Any] = {}
    parameters: list[str] = []
    owners: dict[Any, str] = {}
    for name, fqn in names.items():
        values = [model.content[name] for model in models]
        if not all(isinstance(value, StoredTensor) or is_part(value) for value in values):
            extra[fqn] = values[0]
            continue
        parts = [p for value, model in zip(values, models, strict=True) for p in parts_of(value, model, fqn)]
        # Tied names have the same elements in the same storages on every rank.
        elements = tuple(part.extent for _, part in parts if part.extent.numel)
        owner = owners.setdefault((elements, parts[0][0]), fqn) if elements else fqn
        if owner != fqn:
            reading.ties[fqn] = owner
            continue
        reading.tensors[fqn, WEIGHT] = assemble(fqn, WEIGHT, parts)
        if all(map(is_part, values)):
            parameters.append(fqn)
    for key, tensor in reading.tensors.items():
        if parameters and tensor.fqn not in parameters:  # not sharded, so FSDP does not keep ranks equal
            reading.tensors[key] = tensor.rank_local()
    if extra:
        reading.items["extra_state"] = extra
    return {fqn: reading.tensors[fqn, WEIGHT].shape for fqn in parameters}


# -- optimizer -----------------------------------------------------------------------------------------------


def _read_optimizers(reading: Reading, files: list[RankFile], parameters: Mapping[str, Shape]) -> Units:
    owned = {fqn: shape for fqn, shape in parameters.items() if fqn not in reading.ties}
    if (flat := read_flat(files, owned)) is not None:
        reading.sources.check_distinct((file.rank, file.path) for file in files)  # flat ranges record no ranks
        units, reading.states = flat
        reading.tensors |= reading.states.tensors
        return units
    order = [fqn for fqn, role in reading.tensors if role == WEIGHT]
    optimizers: list[Optimizer] = []
    for file in files:
        optimizer = read_optimizer(file.content, file.path, order)
        is_numbered = take_apart(file.content, file.path).names() is None
        if optimizer is None or (is_numbered and not _fits(reading, optimizer.states, file)):
            reading.leave_out_optimizer(_left_out(file.path))
            return ()
        optimizer.check_known({*order, *reading.ties}, file.path)
        optimizers.append(optimizer)
    check_same_options([(file, one.groups) for file, one in zip(files, optimizers, strict=True)])
    found, is_cut = OptimizerStates(groups=optimizers[0].groups), False
    held = [(file, optimizer.states) for file, optimizer in zip(files, optimizers, strict=True)]
    for fqn in dict.fromkeys(fqn for _, states in held for fqn in states):
        shape = reading.tensors[reading.ties.get(fqn, fqn), WEIGHT].shape
        for name in dict.fromkeys(name for _, states in held for name in states.get(fqn, ())):
            values = [(file, states[fqn][name]) for file, states in held if name in states.get(fqn, ())]
            if any(_is_wrapped(value) for _, value in values):
                opened = [_opened(file, value, fqn) for file, value in values]
                found.add_parts(fqn, name, opened[0][0], (part for _, part in opened))
            elif odd := [v for _, v in values if isinstance(v, Mapping | Record) and not is_part(v)]:
                kind = f"object {odd[0].typename}" if isinstance(odd[0], Record) else "dict"
                found.objects.add(fqn)
                found.unread.add(name, f"each rank has its own {kind}", [fqn])
            elif _is_scalar(name, values[0][1], shape):
                numbers = different_numbers(name, values, fqn)
                if len(numbers) == 1:
                    found.add_number(fqn, name, numbers[0])
                else:
                    found.unread.add(name, "each rank has its own number", [fqn])
            elif (tensor := _state_tensor(fqn, name, shape, values)) is None:
                reading.leave_out_optimizer(_left_out(files[0].path))
                return ()
            else:
                found.add_tensor(tensor, files[0].path)
                is_cut |= any(isinstance(value, StoredTensor) and value.shape != shape for _, value in values)
    found.check_shapes(owned, files[0].path)
    found.check_all_there(owned, files[0].path)
    if is_cut:
        reading.sources.check_distinct((file.rank, file.path) for file in files)
    reading.tensors |= found.tensors
    reading.states = found
    return ()


def _left_out(path: str) -> str:
    return (
        f"{Path(path).name}: left out the optimizer states: they are numbered, and the files don't map numbers to "
        "parameters"
    )


def _fits(reading: Reading, states: Mapping[str, Mapping[str, Any]], file: RankFile) -> bool:
    """Return True if the shapes fit the numbered parameters.

    At least one sharded state must have the parameter's shape. A slice must not be longer than the parameter.
    """
    for fqn, values in states.items():
        tensor = reading.tensors[fqn, WEIGHT]
        parts = [value for value in values.values() if is_part(value) and not _is_wrapped(value)]
        if parts and not any(shape == tensor.shape for part in parts for shape, _ in parts_of(part, file, fqn)):
            return False
        if any(
            isinstance(value, StoredTensor) and value.extent.numel > max(1, tensor.numel) for value in values.values()
        ):
            return False
    return True


def _is_scalar(name: str, value: Any, shape: Shape) -> bool:
    if isinstance(value, StoredTensor):
        return not value.shape and (name == "step" or bool(shape))
    return not is_part(value)


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, Record) and value.name == "DTensor" and isinstance(value.get("_local_tensor"), Record)


def _opened(file: RankFile, value: Any, fqn: str) -> tuple[Shape, tuple[Box, Record | Extent, int, str]]:
    """Return the whole shape and the rank's part."""
    what = "this state matches no known version of torch and torchao"
    with structure(what, file.path, rank=file.rank, fqn=fqn):
        shape, box, local = placed(value)
        return shape, (box, local if isinstance(local, Record) else local_extent(local, box), file.rank, file.path)


def _state_tensor(fqn: str, name: str, shape: Shape, values: list[tuple[RankFile, Any]]) -> Tensor | None:
    """Assemble a state. None if plain slices don't add up to the parameter."""
    if not all(isinstance(value, StoredTensor) for _, value in values):
        return assemble(fqn, name, [one for file, value in values for one in parts_of(value, file, fqn)])
    extents = [(file, value.extent) for file, value in values]
    copies = [part(shape, whole(shape), extent, file) for file, extent in extents if extent.shape == shape]
    if len(shape) != 1 and len(copies) == len(extents):
        return assemble(fqn, name, copies)
    if any(len(extent.shape) != 1 or not extent.is_contiguous for _, extent in extents):
        return None
    if sum(extent.numel for _, extent in extents) != prod(shape):
        return assemble(fqn, name, copies) if len(copies) == len(extents) else None
    return assemble(fqn, name, in_turn(shape, extents))


# -- rest ----------------------------------------------------------------------------------------------------


def _read_extras(reading: Reading, files: Sequence[RankFile]) -> None:
    """Add one scheduler for all, and each rank's random state."""
    check_same_counts("lr_scheduler", [(file, file.content.get("lr_scheduler")) for file in files])
    for file in files:
        for name, value in file.content.items():
            if name == "rng" and value is not None:
                reading.per_rank.setdefault("rng_state", {})[str(file.rank)] = value
            elif value is not None:
                reading.items.setdefault(str(name), value)
