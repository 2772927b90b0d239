"""Reader for Megatron-DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, Sources, check_all_there
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import MASTER, WEIGHT, Key, ParamGroup
from ckpt.plan.tensors import Shape, Source, Tensor, Whole
from converters.deepspeed.flat_groups import FlatGroup, InFlatGroup, flat_group_states
from converters.deepspeed.layout import before_dealing
from converters.deepspeed.model_file import is_dealt, param_shapes
from converters.deepspeed.parts import Joined, RankPart
from converters.deepspeed.pipeline.args import attributes
from converters.deepspeed.pipeline.folder import Folder
from converters.deepspeed.pipeline.layers import Layers, is_neox, is_recomputed, is_tied
from converters.deepspeed.rank_files import (
    base_groups,
    check_places,
    expect_groups,
    flat_extent,
    inner_file,
    parameter_starts,
    partition_size,
)
from converters.names.megatron.model.spelling import registered
from converters.names.megatron.model.splits import (
    GATED,
    WHOLE,
    Split,
    full_shape,
    has_qkv_in_blocks,
    is_gated,
    known_split,
    rank_boxes,
    second_linear,
)
from converters.optimizers.ranks import check_same, check_same_options
from converters.optimizers.states import OptimizerStates

_OLDEST_ORDER = 2.0
#: Reader's note for the writer.
OTHER_ORDER = "the pipeline's parameter order differs from Megatron-DeepSpeed and GPT-NeoX"


@dataclass(frozen=True, slots=True)
class _LayerPart:
    slice: int
    tp: int
    split: Split
    dtype: Any
    shape: Shape
    source: Source
    layer: int | None = None


#: Options, and the index among groups with equal options.
_GroupKey = tuple[str, int]


@dataclass
class PipelineReading:
    folder: Folder
    layers: Layers = field(default_factory=lambda: Layers({}))
    sources: Sources = field(default_factory=Sources)
    held: dict[Key, list[_LayerPart]] = field(default_factory=dict)
    natives: dict[str, Any] = field(default_factory=dict)
    groups: dict[_GroupKey, tuple[dict[str, None], Mapping[str, Any]]] = field(default_factory=dict)
    group_order: list[_GroupKey] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own_module_order: bool = False
    gated: dict[str, bool] = field(default_factory=dict)
    recomputed: dict[int, dict[str, StoredTensor]] = field(default_factory=dict)
    dp: int = 1
    stages: dict[int, int] = field(default_factory=dict)  # pipeline stage by layer
    states: OptimizerStates = field(default_factory=OptimizerStates)

    def load(self, path: str, rank: int) -> RankFile:
        return self.sources.of_rank(path, rank, "file of DeepSpeed")

    def split(self, fqn: str, path: str) -> Split:
        return known_split(fqn, sections=GATED if self.gated.get(fqn) else (), path=path)

    def tensors(self) -> dict[Key, Tensor]:
        return {key: self._tensor(*key) for key in sorted(self.held, key=lambda key: registered(key[0]))}

    def _tensor(self, fqn: str, role: str) -> Tensor:
        tp = self.folder.tp
        held = self.held[fqn, role]
        first = held[0]
        shape = full_shape(first.split, first.shape, tp)
        copies: dict[int, dict[int, RankPart]] = {}
        for one in held:
            if (one.shape, one.dtype) != (first.shape, first.dtype):
                raise CorruptError(
                    f"ranks store different tensors under one name ({role})",
                    path=self.folder.path,
                    rank=one.slice,
                    fqn=fqn,
                    expected=f"{first.dtype} {list(first.shape)}",
                    found=f"{one.dtype} {list(one.shape)}",
                )
            part = RankPart(one.shape, rank_boxes(one.split, shape, tp, one.tp), one.source, self._ranks(one))
            copies.setdefault(one.slice - one.tp, {})[one.tp] = part
        sources: list[Source] = []
        for stage, parts in copies.items():
            missing = [rank for rank in range(tp) if rank not in parts]
            if missing:
                raise CorruptError(
                    f"a tensor parallel rank lacks its part for a tensor ({role})",
                    path=self.folder.path,
                    rank=stage + missing[0],
                    fqn=fqn,
                )
            if first.split == WHOLE:
                sources += [Joined((parts[rank],)) for rank in range(tp)]
            else:
                sources.append(Joined(tuple(parts[rank] for rank in range(tp))))
        native = self.natives.get(fqn)
        return Tensor(
            fqn, role, first.dtype, shape, sources[0], native if native != first.dtype else None, tuple(sources[1:])
        )

    def _ranks(self, held: _LayerPart) -> range | None:
        """Return ranks with a part, by data-parallel rank.

        runtime/pipe/topology.py, `PipeModelDataParallelTopology`: the axes are pipe, data, model, and the last axis has
        consecutive ranks. The first data-parallel rank writes a layer's file.
        """
        tp = self.folder.tp
        stage = held.slice // tp if held.layer is None else self.stages.get(held.layer)
        if stage is None:
            return None
        first = stage * self.dp * tp + held.tp
        return range(first, first + self.dp * tp, tp)


def read_layers(reading: PipelineReading) -> None:
    folder = reading.folder
    contents = {key: reading.load(path, key[1]) for key, path in folder.layers.items()}
    names = {
        layer: [name for name in file.content if not is_recomputed(name)]
        for (layer, rank), file in contents.items()
        if rank == 0
    }
    reading.layers = Layers.of_names({layer: entries for layer, entries in names.items() if entries}, str(folder.path))
    for (layer, rank), file in contents.items():
        entries = {name: value for name, value in file.content.items() if not is_recomputed(name)}
        if len(entries) < len(file.content) and rank == 0 and layer == reading.layers.transformers[0]:
            reading.notes.append("left out rotary frequencies (rotary_emb.inv_freq): every model computes them")
        if rank == 0:
            left = {name: value for name, value in file.content.items() if name not in entries}
            reading.recomputed |= {layer: left} if left else {}
        if is_neox(entries):
            check_neox(entries, file, folder.tp)
        _note_gated(reading, layer, entries)
        for name, value in entries.items():
            _note_weight(reading, layer, rank, file, name, value)


def _note_weight(reading: PipelineReading, layer: int, rank: int, file: RankFile, name: str, value: Any) -> None:
    fqn = reading.layers.canonical(layer, name)
    if fqn is None:
        raise LossError("this layer entry is unknown", path=file.path, rank=rank, fqn=f"{layer}.{name}")
    if not isinstance(value, StoredTensor):
        raise CorruptError("a layer entry is not a tensor", path=file.path, fqn=name, found=type(value).__name__)
    extent = value.extent
    split = reading.split(fqn, file.path)
    held = _LayerPart(rank, rank, split, extent.dtype, extent.shape, Whole(extent, 0), layer)
    reading.held.setdefault((fqn, WEIGHT), []).append(held)
    reading.natives[fqn] = extent.dtype


def _note_gated(reading: PipelineReading, layer: int, entries: Mapping[str, Any]) -> None:
    """Compare an MLP's matrices to record if the first has gate and up."""
    shapes = {
        reading.layers.canonical(layer, name): value.shape
        for name, value in entries.items()
        if isinstance(value, StoredTensor)
    }
    for fqn, shape in shapes.items():
        second = shapes.get(second_linear(fqn)) if fqn else None
        if fqn and shape and second and len(second) == 2:
            reading.gated[fqn] = is_gated(shape, second)


def check_neox(
    entries: Mapping[str, Any],
    file: RankFile,
    tp: int,
    hint: str = "convert it with GPT-NeoX's tools/ckpts/convert_neox_to_hf.py",
) -> None:
    """Raise LossError for GPT-NeoX layouts that don't fit boxes."""
    biases = [name for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias") if name in entries]
    if biases and tp > 1:
        raise LossError(
            "GPT-NeoX adds up the ranks' biases in this layer under --gpt-j-residual, and the file does not record "
            "that option",
            path=file.path,
            fqn=biases[0],
            hint=hint,
        )
    qkv, dense = (entries.get(f"attention.{name}.weight") for name in ("query_key_value", "dense"))
    if isinstance(qkv, StoredTensor) and isinstance(dense, StoredTensor) and qkv.shape[0] != 3 * dense.shape[1]:
        raise LossError(
            "GPT-NeoX's row order for grouped queries is not supported",
            path=file.path,
            expected=f"{pluralize(3 * dense.shape[1], 'row')}",
            found=f"{qkv.shape[0]}",
        )


def read_slices(reading: PipelineReading) -> list[RankFile]:
    """Return slices' param shapes and training state."""
    folder = reading.folder
    files = [reading.load(folder.slices[number], number) for number in range(len(folder.slices))]
    check_same("step", [(file, file.content.get("global_steps")) for file in files])
    check_same("dp_world_size", [(file, file.content.get("dp_world_size")) for file in files])
    for file in files:
        degrees = file.content.get("checkpoint_parallel_dimensions")
        recorded = (degrees.get("tp_degree"), degrees.get("pp_degree")) if isinstance(degrees, Mapping) else None
        slices = file.content.get("mp_world_size", len(files))
        if recorded not in (None, (folder.tp, folder.pp)) or slices != len(files):
            raise CorruptError(
                "the rank files do not match the run",
                **file.where,
                expected=f"TP {recorded[0]}, PP {recorded[1]}" if recorded else f"{pluralize(slices, 'model file')}",
                found=f"TP {folder.tp}, PP {folder.pp}: {pluralize(len(files), 'model file')}",
            )
        if file.content.get("module") is not None:
            raise NotFoundError(
                "a model file with its own module next to pipeline layers is not supported",
                path=file.path,
            )
        if file.content.get("optimizer") is not None:
            raise NotFoundError("optimizer states inside the model files (no ZeRO) are not supported", path=file.path)
    _check_order(files[0])
    _check_layers(reading, files)
    recorded_dp = files[0].content.get("dp_world_size")
    ranks = (rank for rank, _ in folder.partitions)
    reading.dp = recorded_dp if isinstance(recorded_dp, int) else 1 + max(ranks, default=0)
    reading.stages = _stages_by_layer(reading, files)
    return files


def _check_order(file: RankFile) -> None:
    """Raise NotFoundError unless query_key_value's rows are interleaved by head: checkpoint version 2.0 or later."""
    version = file.content.get("checkpoint_version", _OLDEST_ORDER)
    if not isinstance(version, int | float) or version < _OLDEST_ORDER:
        raise NotFoundError(
            "unsupported order for the query_key_value rows in this Megatron checkpoint version",
            path=file.path,
            expected=f"checkpoint_version {_OLDEST_ORDER} or later",
            found=version,
            hint="load and save it with Megatron-DeepSpeed to reorder them",
        )
    if has_qkv_in_blocks(attributes(file.content.get("args"))):
        raise NotFoundError(
            "unsupported query_key_value row order: Megatron-DeepSpeed since December 2024 (commit 676a482c) stores "
            "a rank's queries, then keys, then values",
            path=file.path,
            expected="rows by head, or by group of heads",
            found="the argument ds_sequence_parallel_fpdt from a newer version",
        )


def _check_layers(reading: PipelineReading, files: Sequence[RankFile]) -> None:
    recorded = attributes(files[0].content.get("args")).get("num_layers")
    found = len(reading.layers.transformers)
    if isinstance(recorded, int) and recorded != found:
        raise CorruptError(
            "transformer layer files are missing, or left over from another run",
            path=reading.folder.path,
            expected=f"{pluralize(recorded, 'layer')} from the run's arguments",
            found=f"{pluralize(found, 'layer')}",
        )
    for file in files:
        for name, number in _parameters(file):
            if number is not None and number not in reading.layers.kinds:
                raise CorruptError(
                    "a layer file is missing",
                    path=reading.folder.path,
                    rank=file.rank,
                    fqn=name,
                    expected=f"layer_{number:02d}-model_{file.rank % reading.folder.tp:02d}-model_states.pt",
                    found="no file",
                )


def _parameters(file: RankFile) -> Iterator[tuple[str, int | None]]:
    """Yield names with their layer number, or None for tied parameters."""
    for shapes in param_shapes(file) if file.content.get("param_shapes") is not None else []:
        for name in shapes:
            number = name.partition(".")[0]
            yield name, int(number) if number.isdigit() else None


def _stages_by_layer(reading: PipelineReading, files: Sequence[RankFile]) -> dict[int, int]:
    """Return each layer's stage. Tied layers are on the first and the last."""
    found: dict[int, int] = {}
    tied: list[int] = []
    for file in files:
        stage = file.rank // reading.folder.tp
        for name, number in _parameters(file):
            if number is not None:
                found.setdefault(number, stage)
            elif is_tied(name):
                tied.append(stage)
    for layer in reading.layers.kinds:
        if layer not in found and tied:
            found[layer] = min(tied) if layer < reading.layers.transformers[0] else max(tied)
    return found


def read_partitions(reading: PipelineReading, slices: Sequence[RankFile]) -> RankFile | None:
    """Add all slices' masters and states. Return the first rank's optimizer."""
    folder = reading.folder
    if not folder.partitions:
        reading.notes.append("there are no optimizer files: weights only")
        return None
    first, dp = None, reading.dp
    expected = [(rank, number) for number in range(len(slices)) for rank in range(dp)]
    what = "an optimizer partition (data parallel rank, slice) is missing"
    check_all_there(what, folder.partitions, expected, folder.path)
    extra = [key for key in folder.partitions if key not in set(expected)]
    if extra:
        raise CorruptError(
            "found partitions from more ranks than the run had: left over from an earlier, larger run",
            path=folder.partitions[extra[0]],
            expected=f"{dp} data parallel ranks of {pluralize(len(slices), 'slice')}",
            found=f"{pluralize(len(folder.partitions), 'file')}",
            hint="move them out of the folder if they do not belong to this run",
        )
    for slice_file in slices:
        inners = [inner_file(reading.load(folder.partitions[rank, slice_file.rank], rank)) for rank in range(dp)]
        _read_slice(reading, slice_file, inners)
        first = first or inners[0]
    reading.sources.check_distinct((rank, folder.partitions[rank, number]) for rank, number in expected)
    groups = (reading.groups[key] for key in reading.group_order)  # each in the model's order
    reading.states.groups = tuple(ParamGroup(tuple(sorted(fqns, key=registered)), some) for fqns, some in groups)
    return first


def stage_sizes(reading: PipelineReading, slices: Sequence[RankFile]) -> list[int] | None:
    """Count transformer layers per stage. None if layers are missing."""
    transformers = set(reading.layers.transformers)
    stages = slices[:: reading.folder.tp]
    sizes = [len(transformers & {number for _, number in _parameters(file)}) for file in stages]
    return sizes if sum(sizes) == len(transformers) else None


def _read_slice(reading: PipelineReading, file: RankFile, inners: list[RankFile]) -> None:
    groups = param_shapes(file)
    expect_groups(inners, "single_partition_of_fp32_groups", len(groups))
    _check_partitions(inners)
    options = [group.options for group in base_groups(inners[0])]
    keys: list[_GroupKey] = []
    for number, shapes in enumerate(groups):
        partition = partition_size(inners, number)
        starts = parameter_starts(shapes, inners[0], number, partition * len(inners))
        states = flat_group_states(inners, number, partition)
        masters = [flat_extent(inner.need("single_partition_of_fp32_groups")[number], inner) for inner in inners]
        fqns: dict[str, None] = {}
        for name, shape in shapes.items():
            fqn = reading.layers.of_parameter(name)
            if fqn is None:
                raise LossError("this parameter is unknown", **file.where, fqn=name)
            if is_tied(name) and file.rank >= reading.folder.tp and fqn.endswith("position_embeddings.weight"):
                kept = "only the word embedding there is kept equal to the first stage's"
                if (note := f"{fqn} of the last stage is left out: {kept}") not in reading.notes:
                    reading.notes.append(note)
                continue
            fqns[fqn] = None
            _check_shape(reading, file, fqn, shape)
            split = reading.split(fqn, file.path)
            tp = file.rank % reading.folder.tp
            for role, extents in {MASTER: masters, **states.buffers}.items():
                source = states.in_blocks(InFlatGroup(FlatGroup(extents, partition), starts[name]), role)
                held = _LayerPart(file.rank, tp, split, extents[0].dtype, shape, source)
                reading.held.setdefault((fqn, role), []).append(held)
        states.add_to(reading.states, fqns, file)
        dealt = is_dealt(file, inners[0])
        if not dealt:  # DeepSpeed records places from before the reordering
            check_places(inners, number, shapes, list(shapes))
        _check_parameter_order(reading, before_dealing(list(shapes), len(inners)) if dealt else shapes)
        if fqns:
            chosen = options[number] if number < len(options) else {}
            same = repr(sorted(chosen.items()))
            keys.append((same, sum(key[0] == same for key in keys)))
            known, _ = reading.groups.setdefault(keys[-1], ({}, chosen))
            known |= fqns
    _merge_order(reading.group_order, keys)


def _merge_order(order: list[_GroupKey], keys: Sequence[_GroupKey]) -> None:
    """Merge a slice's groups. A stage may lack groups between its own."""
    place = 0
    for key in keys:
        if key not in order:
            order.insert(place, key)
        place = order.index(key) + 1


def _check_parameter_order(reading: PipelineReading, names: Iterable[str]) -> None:
    fqns = [fqn for name in names if (fqn := reading.layers.of_parameter(name)) is not None]
    if fqns != sorted(fqns, key=reading.layers.order) and not reading.own_module_order:
        reading.notes.append(OTHER_ORDER)
        reading.own_module_order = True


def _check_partitions(inners: Sequence[RankFile]) -> None:
    for inner in inners:
        counts = inner.need("partition_count")
        counts = counts if isinstance(counts, Sequence) else [counts]
        if any(count != len(inners) for count in counts):
            raise CorruptError(
                "the folder mixes files from different runs",
                **inner.where,
                expected=f"{len(inners)} data parallel ranks",
                found=", ".join(map(str, counts)),
            )
    check_same_options([(inner, base_groups(inner)) for inner in inners])


def _check_shape(reading: PipelineReading, file: RankFile, fqn: str, shape: Shape) -> None:
    weights = reading.held.get((fqn, WEIGHT))
    if not weights or weights[0].shape != shape:
        raise CorruptError(
            "the optimizer's part of a parameter does not match the layer file",
            **file.where,
            fqn=fqn,
            expected=list(weights[0].shape) if weights else "a layer with this parameter",
            found=list(shape),
        )
