"""PyTorch Distributed Checkpoint (DCP), written by FSDP1, FSDP2, torchtitan, Accelerate and HF Trainer.

Roles: FSDP's optimizer steps the sharded parameters themselves. With mixed precision they are fp32. So a parameter,
like a buffer, has the single role `weight` in its stored dtype, and targets with fp32 masters use it as the master. The
output holds the source's fp32 masters, bit for bit, as its parameters, unless `--dtype` is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.metadata import Metadata, Path_, read_metadata
from ckpt.containers.dcp.nested import nest
from ckpt.containers.dcp.shards import read_shards
from ckpt.containers.dcp.tensors import ChunkedTensor, DataFiles, Placed, writer_of
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import Record
from ckpt.move.files import confined
from ckpt.plan.checkpoint import (
    OWN,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Key,
    Layout,
    OneElement,
    ParamGroup,
    QuantizedStates,
    ReadRequest,
    Target,
    TrainingState,
)
from ckpt.plan.tensors import Box, Extent, Shape, Tensor
from ckpt.plan.tiling import faults_of
from ckpt.runs.model_files import read_config
from ckpt.runs.steps import enclosing_folders, trainer_step
from ckpt.runs.trainer_files import lightnings_record, run_companions, trainer_folder
from converters.names.options import NameOptions
from converters.names.transformers.ties import tied_names
from converters.optimizers.ranks import check_same
from converters.optimizers.state_dicts import GROUPS
from converters.optimizers.states import OptimizerStates, check_can_be_read, missing_state_error
from converters.pytorch.facts import TorchFacts
from converters.pytorch.folder import MODEL_0, OPTIMIZER_0, SHARD, find_folder, parts, run_folders
from converters.pytorch.keys import MODEL_NAMES, OPTIMIZER_NAMES, Leaf, Understood, understand, without_tensors
from converters.pytorch.state import state_dict
from converters.pytorch.state_dicts import tie_as_declared

#: Step counts in torch's recipes and Lightning, torchtitan.
_STEPS = (("step",), ("global_step",), ("iteration",), ("train_state", "step"))


class DistributedCheckpoint(Format):
    name = "dcp"
    title = "PyTorch DCP (FSDP)"
    aliases = ("fsdp", "fsdp2")
    #: The loading engine uses in-memory names.
    namespace = TRANSFORMERS
    carries_blocks = True
    takes = ("world_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_folder(path, tag)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        reading = StateDictReading()
        found = parts(path)
        for folder in found.folders:
            reading.folder(folder)
        reading.is_pair = len(found.folders) + bool(found.shards) + found.is_hub > 1
        if found.is_hub:
            reading.hub_model(path, request)
        if found.shards:
            reading.shards(path, found.shards)
        if found.local:
            reading.local(path.parent if path.is_file() else path, found.local, _config(request, run_folders(path)))
        return reading.checkpoint(path, request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Lay out one folder, or Accelerate's two if the source is a step of HF Trainer or Accelerate."""
        from ckpt.containers.dcp.write import Writing

        num_ranks = layout.world_size or checkpoint.world_size or 1
        check_can_be_read(checkpoint)
        state = state_dict(checkpoint, layout.dtype, flat_optimizer=layout.read(NameOptions).flat_optimizer)
        record, told = lightnings_record(checkpoint, num_ranks)
        beside = run_companions(
            checkpoint, num_ranks, layout.dtype, deepspeed=False, own=record, names=checkpoint.shapes
        )
        folders = [Writing(num_ranks, prefix) for prefix in _prefixes(checkpoint)]
        facts = checkpoint.facts_of(TorchFacts)
        folders[0].add_all(placed(state.model, facts.model_at))
        folders[-1].add_all((*placed(state.optimizer, facts.optimizer_at), *state.rest))
        files = [file for folder in folders if folder.paths for file in folder.files()]
        return Target(
            files=(*beside.files, *files),
            dropped=(*state.dropped, *beside.dropped),
            notes=(*state.notes, *beside.notes, *told),
        )


DCP = DistributedCheckpoint()


def placed(entries: Iterable[tuple[Path_, Any]], at: Path_) -> Iterator[tuple[Path_, Any]]:
    """Move entries to their path in the source. torchtitan's model has an empty path."""
    from ckpt.containers.dcp.write import Alias

    for path, value in entries:
        moved = (*at, *path[1:]) if path[0] in ("model", "optimizer") and len(path) > 1 else path
        yield moved, Alias((*at, *value.path[1:])) if moved is not path and isinstance(value, Alias) else value


def _prefixes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the prefixes of the folders to write, model first.

    A step of HF Trainer or Accelerate keeps its two folders, so it can be resumed (Accelerate 1.15,
    `utils/fsdp_utils.py`).
    """
    path = Path(checkpoint.path)
    homes = {Path(file.path).parent for file in checkpoint.files}
    is_pair = not homes.isdisjoint({path / MODEL_0, path / OPTIMIZER_0})
    return (f"{MODEL_0}/", f"{OPTIMIZER_0}/") if is_pair or trainer_folder(checkpoint) else ("",)


# -- storage ---------------------------------------------------------------------------------------------------


@dataclass
class StateDictReading:
    """Leaves of a nested state dict, and the checkpoint in them."""

    format_name: str = "dcp"
    data: DataFiles = field(default_factory=DataFiles)
    leaves: list[tuple[Path_, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metadata: str = ""
    states: OptimizerStates = field(default_factory=OptimizerStates)
    spread: list[str] = field(default_factory=list)
    is_pair: bool = False
    lacks_shapes: bool = False
    per_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Any DTensor of the files.
    dtensor: Record | None = None

    # -- files ---------------------------------------------------------------------------------------------------

    def folder(self, folder: Path) -> None:
        metadata = read_metadata(folder)
        self.metadata = self.metadata or metadata.path
        _refuse_flat(metadata)
        found = self.data.read(metadata)
        leaves = [self._stored(leaf) if isinstance(leaf, ChunkedTensor) else leaf for leaf in found]
        for number, other in _same_items(metadata, found).items():
            leaves[number].same_as = other
        self.leaves += [(path, leaves[number]) for number, _, path in metadata.paths()]
        self.data.count_ranks(folder)

    def _stored(self, tensor: ChunkedTensor) -> Leaf:
        entry = tensor.entry
        path = tensor.placed[0][1].path if tensor.placed else self.metadata
        source = self.data.source(entry.dtype, entry.shape, tensor.placed)
        replicas = self.data.replicas(tensor) if not tensor.wrapped else ()
        stored = Leaf(entry.key, entry.dtype, entry.shape, source, path, replicas, tensor.number)
        stored.wrapped, stored.placed = tensor.wrapped, tensor.placed
        return stored

    # -- safetensors ---------------------------------------------------------------------------------------------

    def shards(self, folder: Path, names: tuple[str, ...]) -> None:
        """Read files written by `HuggingFaceStorageWriter`.

        A rank skips a file of the index if it has nothing in it, but some rank writes each file.
        """
        ranks, numbers, counts = zip(*(map(int, SHARD.findall(name)[0]) for name in names), strict=True)
        if missing := sorted({*range(1, max(counts) + 1)} - {*numbers}):
            left = f"{max(counts) - len(missing)} of {pluralize(max(counts), 'number')}"
            raise IncompleteError(
                "safetensors files are missing",
                path=folder,
                expected=f"shard-...-model-{missing[0]:05d}-of-{max(counts):05d}.safetensors, from any rank",
                found=f"{pluralize(len(names), 'file')}, {left}",
            )
        for tensor in read_shards(folder, names):
            source = self.data.source(tensor.dtype, tensor.shape, tensor.placed)
            stored = Leaf(tensor.fqn, tensor.dtype, tensor.shape, source, tensor.path)
            self.leaves.append((("model", tensor.fqn), stored))
        for name in names:
            self.data.add_file(str(folder / name))
        self.data.ranks = max(self.data.ranks, *ranks)
        self.lacks_shapes = True

    def hub_model(self, folder: Path, request: ReadRequest) -> None:
        from converters.pytorch.trainer import in_memory

        model = in_memory(folder, request)
        for tensor in model.with_role(WEIGHT):
            path = next(iter(fragment.extent.path for fragment in tensor.fragments()), str(folder))
            leaf = Leaf(tensor.fqn, tensor.dtype, tensor.shape, tensor.source, path, tensor.replicas)
            self._add_with_ties(leaf, model.ties)
        self.data.files |= {file.path: file for file in model.files}
        self.notes += model.notes

    def _add_with_ties(self, leaf: Leaf, ties: Mapping[str, str]) -> None:
        self.leaves.append((("model", leaf.key), leaf))
        for alias in (alias for alias, owner in ties.items() if owner == leaf.key):
            self.leaves.append((("model", alias), replace(leaf, key=alias, same_as=leaf.key)))

    # -- FSDP1's LOCAL_STATE_DICT ----------------------------------------------------------------------------------

    def local(self, folder: Path, names: tuple[tuple[int, str], ...], config: Mapping[str, Any] | None) -> None:
        """Add rank files. Call after `folder`, because the optimizer's states give the shapes."""
        from converters.names.module_order import registered_shapes
        from converters.pytorch.local_state import read_local

        sources = Sources()
        files = [sources.of_rank(confined(folder, name), rank, "state dict") for rank, name in names]
        sources.check_distinct((file.rank, file.path) for file in files)
        self.notes += sources.notes
        known = understand(nest(self.leaves, self.metadata), self.metadata) if self.leaves else Understood()
        found = read_local(files, _recorded_shapes(known), registered_shapes(config) if config else {})
        found.ties |= tied_names(config, found.tensors) if config else {}
        for fqn, tensor in found.tensors.items():
            leaf = Leaf(fqn, tensor.dtype, tensor.shape, tensor.source, files[0].path, tensor.replicas)
            self._add_with_ties(leaf, found.ties)
        self.leaves += [(("model", fqn), value) for fqn, value in found.values.items()]
        self.data.files |= sources.by_path
        self.data.ranks = max(self.data.ranks, len(files))

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def checkpoint(self, path: Path, request: ReadRequest) -> Checkpoint:
        file = self.metadata or str(path)
        found = understand(nest(self.leaves, file), file, None if request.tag == path.name else request.tag)
        if not found.weights and not found.states:
            raise without_tensors(found, file)
        self.notes += found.notes
        _check_states(found, self.metadata, self.is_pair)
        tensors: dict[Key, Tensor] = {}
        for fqn, leaf in found.weights.items():
            if leaf.wrapped:
                raise NotFoundError(
                    "a weight uses an unsupported tensor subclass",
                    path=leaf.path,
                    fqn=fqn,
                    found=next(iter(leaf.wrapped.values())).typename,
                )
            if leaf.same_as is None:
                tensors[fqn, WEIGHT] = leaf.tensor(fqn, WEIGHT)
        ties = _stored_ties(found.weights)
        odd = self._states(found, tensors)
        if self.lacks_shapes and not _recorded_shapes(found).keys() >= {fqn for fqn, role in tensors if role == WEIGHT}:
            self.notes.append(
                "DCP's safetensors files record neither full shapes nor the number of ranks: a missing file from the "
                "last rank would go unnoticed"
            )
        folders = run_folders(path)
        tie_as_declared(tensors, ties, _config(request, folders))
        entries = self._entries(found, odd)
        step = _step(found.rest)
        if step is None:  # Accelerate's folders hold no training state
            step = next((n for folder in folders if (n := trainer_step(Path(folder))) is not None), None)
        self.states.groups = tuple(map(_plain_group, found.groups))
        recorded = self.states.recorded()
        state = TrainingState.of_entries("torch", entries, step=step, per_rank=self.per_rank, **recorded)
        return Checkpoint(
            path=str(path),
            format=self.format_name,
            tensors=tensors,
            files=tuple(self.data.files.values()),
            framework="torch",
            facts=TorchFacts(True, found.model_at, found.optimizer_at, found.is_flat, self.dtensor),
            world_size=self.data.ranks or None,
            namespace=OWN,
            ties=ties,
            state=state,
            folders=folders,
            notes=(*self.notes, *self.data.notes),
            computed=self.states.computed,
            quantized=QuantizedStates(self.states.quantized, self.states.blocks),
            unread=self.states.left_out(),
        )

    def _states(self, found: Understood, tensors: dict[Key, Tensor]) -> dict[str, Any]:
        """Return states that are neither tensors nor numbers.

        A state with only 0-dim tensors is a number (`step`), even for a 0-dim parameter.
        """
        shaped = {name for (_, name), value in found.states.items() if isinstance(value, Leaf) and value.shape}
        states = self.states
        odd: dict[str, Any] = {}
        said: dict[str, set[Any]] = {}
        for (fqn, name), value in found.states.items():
            if isinstance(value, Leaf) and value.wrapped:
                parts: list[tuple[Box, Record | Extent]] = [*value.wrapped.items(), *value.placed]
                held = ((box, part, None, self.metadata) for box, part in parts)
                states.add_parts(fqn, name, value.shape, held)
            elif isinstance(value, Leaf) and (value.shape or name in shaped):
                states.add_tensor(value.tensor(fqn, name), value.path)
            elif isinstance(value, Leaf):
                number = value.number if name == "step" else OneElement(value.number or 0, value.dtype, ())
                states.add_number(fqn, name, number)
                if name == "step":
                    said.setdefault(value.path, set()).add((fqn, value.number))
            elif isinstance(value, int | float):
                states.add_number(fqn, name, value)
            elif isinstance(value, Mapping | Record):
                weight = tensors.get((fqn, WEIGHT))
                values = _values({name: value}, name, self.spread)
                states.add(fqn, weight.shape if weight else (), values, self.metadata)
            else:
                odd.setdefault(fqn, {})[name] = value
        states.objects |= {fqn for (fqn, _), value in found.states.items() if not isinstance(value, Leaf | int | float)}
        weights = {fqn: tensor for (fqn, role), tensor in tensors.items() if role == WEIGHT}
        if any(one.fqn in weights and one.shape != weights[one.fqn].shape for one in states.tensors.values()):
            # A damaged weight has its own error. Finding damage is slow with many ranks.
            shapes = {fqn: weight.shape for fqn, weight in weights.items() if not any(faults_of(weight))}
            states.check_shapes(shapes, self.metadata)
        tensors |= states.tensors
        _check_steps(said)
        return odd

    def _entries(self, found: Understood, odd: dict[str, Any]) -> dict[str, Any]:
        """Return training state. Note tensors spread over ranks."""
        spread = self.spread
        items = {name: _values(value, name, spread) for name, value in found.rest.items()}
        if found.extra:
            items["extra_state"] = found.extra
        if odd:
            items["optimizer"] = {**items.get("optimizer", {}), "state": odd}
        others = tuple(f"{name}." for name in found.others)
        own = (name for name in spread if not name.startswith(others))
        lost = next((name for name in own if name.partition(".")[0] in (*MODEL_NAMES, *OPTIMIZER_NAMES)), None)
        if lost is not None:
            raise CorruptError("a model or optimizer tensor is unknown", path=self.metadata, fqn=lost)
        if spread:
            self.notes.append(
                f"{pluralize(len(spread), 'tensor')} outside the model and optimizer are spread over ranks and not "
                f"carried: {', '.join(spread[:3])}{', ...' if len(spread) > 3 else ''}"
            )
        return {name: value for name, value in items.items() if value is not _LEFT}


_LEFT = object()


def _values(value: Any, name: str, spread: list[str]) -> Any:
    if isinstance(value, Leaf):
        alone = value.alone()
        if alone is None:
            spread.append(name)
            return _LEFT
        return alone
    if type(value) is dict:
        inner = {key: _values(item, f"{name}.{key}", spread) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not _LEFT}
    if type(value) is list:
        listed = [_values(item, f"{name}.{n}", spread) for n, item in enumerate(value)]
        return [None if item is _LEFT else item for item in listed]
    return value


def _plain_group(group: ParamGroup) -> ParamGroup:
    """Turn tensors into training state values. An optimizer with a tensor `lr` accepts no number."""
    options = {}
    for name, value in group.options.items():
        if isinstance(value, Leaf):
            alone = value.alone()
            value = value.number if alone is None else alone
        options[name] = value
    return ParamGroup(group.fqns, options)


def _recorded_shapes(known: Understood) -> dict[str, Shape]:
    """Return shapes, in param group order, if a parameter's states agree."""
    shapes: dict[str, set[Shape]] = {}
    for (fqn, _), value in known.states.items():
        if isinstance(value, Leaf) and value.shape:
            shapes.setdefault(fqn, set()).add(value.shape)
    order = dict.fromkeys(fqn for group in known.groups for fqn in group.fqns)
    return {fqn: next(iter(shapes[fqn])) for fqn in order if len(shapes.get(fqn, ())) == 1}


def _same_items(metadata: Metadata, found: Sequence[Any]) -> dict[int, str]:
    """Map tensors to the key of an earlier tensor stored in the same bytes.

    Metadata alone does not show this for a safetensors file.
    """
    known = [(number, key, found[number]) for number, key, path in metadata.paths() if path[:-1] == ("model",)]
    held = [(number, key, tensor.placed) for number, key, tensor in known if isinstance(tensor, ChunkedTensor)]
    same = same_places((key, placed) for _, key, placed in held)
    return {number: same[key] for number, key, _ in held if key in same}


def same_places(tensors: Iterable[tuple[str, Placed]]) -> dict[str, str]:
    """Map keys to an earlier key with the same chunks."""
    first: dict[tuple[tuple[Box, Extent], ...], str] = {}
    owners = {key: first.setdefault(tuple(placed), key) for key, placed in tensors if placed}
    return {key: owner for key, owner in owners.items() if owner != key}


def _stored_ties(weights: Mapping[str, Leaf]) -> dict[str, str]:
    names = {leaf.key: fqn for fqn, leaf in weights.items()}
    return {fqn: names[leaf.same_as] for fqn, leaf in weights.items() if leaf.same_as is not None}


def _config(request: ReadRequest, folders: Iterable[str]) -> Mapping[str, Any] | None:
    places = [] if request.config is None else [request.config]
    return read_config([*places, *(place for folder in folders for place in enclosing_folders(Path(folder)))])


def _step(rest: Mapping[str, Any]) -> int | None:
    for names in _STEPS:
        value: Any = rest
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, Leaf):
            value = value.number
        if type(value) is int:
            return value
    return None


def _check_states(found: Understood, path: str, is_pair: bool) -> None:
    """Raise CorruptError for states without a parameter, or a parameter missing a state of its group."""
    states = {key: value.dtype if isinstance(value, Leaf) else None for key, value in found.states.items()}
    trained = dict.fromkeys(fqn for fqn, _ in states)
    strange = [fqn for fqn in trained if fqn not in found.weights]
    is_all = len(strange) == len(trained)
    if is_all and is_pair and strange and found.weights:
        raise CorruptError(
            "the optimizer folder belongs to another model",
            path=path,
            fqn=strange[0],
            expected=next(iter(found.weights)),
        )
    if strange and not is_all:
        raise CorruptError("the optimizer has states for a parameter missing from the model", path=path, fqn=strange[0])
    dimensions = {fqn: len(leaf.shape) for fqn, leaf in found.weights.items()}
    if error := missing_state_error(found.groups, states, dimensions, CorruptError, path):
        raise error


def _check_steps(said: Mapping[str, set[tuple[str, Any]]]) -> None:
    """Raise CorruptError for files from different saves.

    One parameter may have taken fewer steps, so a file with a single parameter proves nothing.
    """
    steps = {path: {step for _, step in pairs} for path, pairs in said.items() if len(pairs) > 1}
    if any(len(found) > 1 for found in steps.values()):
        return
    files = ((RankFile(path, writer_of(path) or 0, {}), found) for path, found in sorted(steps.items()))
    check_same("step", [(file, next(iter(found))) for file, found in files])


def _refuse_flat(metadata: Metadata) -> None:
    """Raise CorruptError without recorded paths: `optimizer.state.<fqn>.exp_avg` is ambiguous."""
    if metadata.is_nested:
        return
    if any(GROUPS in key.split(".") for key in metadata.keys):
        raise CorruptError(
            "the metadata does not record the optimizer's key structure",
            path=metadata.path,
            expected="planner_data in the form torch's default planner writes",
        )


__all__ = ["DCP"]
