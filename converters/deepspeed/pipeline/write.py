"""Writer for Megatron-DeepSpeed with any tensor, pipeline and data parallel sizes.

Partitions use ZeRO-1's schema, which BF16_Optimizer also loads.

Format facts: see `converters.deepspeed.pipeline.format`; for stages deepspeed 0.19.8, runtime/utils.py,
`partition_balanced`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Keyword, Message
from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.values import StoredDict
from ckpt.containers.torchfile.write import FromSource, NewTensor, torch_file
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint, Key, Layout, ParamGroup, Target, TargetFile
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Shape
from ckpt.runs.steps import TRACKER
from ckpt.runs.trainer_files import model_files
from converters.deepspeed import model as zero_model
from converters.deepspeed.facts import DeepSpeedFacts
from converters.deepspeed.keys import MODEL_STATE, OPTIMIZER_STATE, PIPELINE, UNIVERSAL_INFO
from converters.deepspeed.model import DeepSpeedModel
from converters.deepspeed.pipeline.args import namespace, of_neox, recorded
from converters.deepspeed.pipeline.layers import Kind, Layers
from converters.deepspeed.pipeline.read import OTHER_ORDER
from converters.deepspeed.write import (
    FlattenedGroup,
    LocalParameter,
    batch_notes,
    common_root,
    flat_group,
    master_notes,
    optimizer_file,
    partitions,
    stage12_items,
    step_folder,
)
from converters.names.megatron.model.axes import STAGE_ARGS, Grid, Stages
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT
from converters.names.megatron.model.splits import known_split, rank_boxes, rank_shape, sections_of
from converters.names.megatron.options import MegatronOptions

_POSITIONS = "embedding.position_embeddings.weight"


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    pipeline = _describe(checkpoint, layout)
    model, step = pipeline.model, checkpoint.state.step
    folder = step_folder(checkpoint)
    client, dropped = _client(pipeline)
    ranks = product(range(pipeline.grid.pp), range(pipeline.grid.tp))
    roots = chain(_layer_files(pipeline), *(_slice_files(pipeline, client, pp, tp) for pp, tp in ranks))
    files = [torch_file(f"{folder}/{name}", root) for name, root in roots]
    trackers = [TargetFile.of_bytes("latest", folder.encode())]
    if step is not None:
        trackers.append(TargetFile.of_bytes(TRACKER, str(step).encode()))
    return Target(
        files=(*files, *model_files(checkpoint, layout.dtype)[0], *trackers),
        left_out={**model.left_out, **pipeline.without_groups},
        dropped=(*dropped, *model.dropped),
        notes=(*pipeline.notes, *model.notes, *_pipeline_notes(pipeline)),
    )


# -- target --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pipeline:
    model: DeepSpeedModel
    layers: Layers
    grid: Grid
    stages: Stages
    dp: int
    config: dict[str, Any]
    record: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @cached_property
    def tensors(self) -> dict[str, Choice]:
        buffers = {fqn: Choice(tensor, tensor.dtype) for fqn, tensor in self.model.buffers.items()}
        found = {**self.model.weights, **buffers}
        return {fqn: found[fqn] for fqn in sorted(found, key=self.layers.order)}

    @cached_property
    def has_optimizer(self) -> bool:
        return self.model.resumable and bool(self.model.masters)

    @cached_property
    def without_groups(self) -> dict[Key, str]:
        if self.has_optimizer:
            return {}
        left = [key for key in self.checkpoint.tensors if key[1] not in (WEIGHT, BUFFER)]
        why = "the source has no hyperparameters for param groups, so no optimizer is written"
        return dict.fromkeys(left, f"{', '.join(sorted({role for _, role in left}))}: {why}")

    def stage_of(self, number: int) -> int:
        kind = self.layers.kinds[number]
        if kind is Kind.TRANSFORMER:
            return self.stages.place(self.layers.transformers.index(number))[0]
        return 0 if kind is Kind.EMBEDDING else self.grid.pp - 1

    @cached_property
    def members(self) -> list[dict[str, None]]:
        """Names of each stage's parameters in module order. A tied embedding is in the last stage, too."""
        found: list[dict[str, None]] = [{} for _ in range(self.grid.pp)]
        for fqn in self.tensors:
            place = self.layers.place(fqn)
            assert place is not None
            found[self.stage_of(place[0])][fqn] = None
            if self.layers.tied and self.layers.kinds[place[0]] is Kind.EMBEDDING:
                found[-1][fqn] = None
        return [dict.fromkeys(sorted(names, key=self.layers.order)) for names in found]

    def local(self, fqn: str, tp: int) -> LocalParameter:
        shape = self.tensors[fqn].tensor.shape
        split = known_split(fqn, sections=sections_of(fqn, self._shape))
        try:
            boxes = rank_boxes(split, shape, self.grid.tp, tp)
        except UsageError as error:
            error.fqn = fqn
            raise
        return LocalParameter(self.layers.parameter(fqn), rank_shape(split, shape, self.grid.tp), boxes)

    def _shape(self, fqn: str) -> Shape | None:
        return self.tensors[fqn].tensor.shape if fqn in self.tensors else None


def _describe(checkpoint: Checkpoint, layout: Layout) -> _Pipeline:
    record = checkpoint.state.private.get("megatron-deepspeed", {}).get(PIPELINE)
    record = record if isinstance(record, Mapping) else {}
    args = checkpoint.state.args or {}
    others = {name: value for name, value in checkpoint.state.private.items() if name != "megatron-deepspeed"}
    model = zero_model.describe(replace(checkpoint, state=replace(checkpoint.state, private=others)), layout.dtype)
    layers = _layers(model, record, args)
    grid = _grid(args, layout)
    stage = 0 if zero_model.zero_options(checkpoint).get("stage") == 0 and record else 1
    config, notes = zero_model.ds_config(model, stage, layout.dtype)
    pipeline = _Pipeline(
        model,
        layers,
        grid,
        _stages(len(layers.transformers), grid, layout, record.get("stages")),
        _data_parallel_size(checkpoint, grid, layout),
        config,
        record,
        tuple(notes),
    )
    _check(pipeline, args)
    return pipeline


def _layers(model: DeepSpeedModel, record: Mapping[str, Any], args: Mapping[str, Any]) -> Layers:
    """Use GPT-NeoX's numbering only if Megatron-DeepSpeed's does not fit."""
    names = (*model.weights, *model.buffers)
    if record:
        layers = Layers({number: Kind(kind) for number, kind in record["kinds"].items()}, record["neox"])
    else:
        numbers = {int(fqn.split(".")[2]) for fqn in names if fqn.startswith("decoder.layers.")}
        make = Layers.of_neox if args.get("gpt_j_residual") else Layers.of_model
        layers = make(len(numbers), tied=OUTPUT not in names)
    for fqn in names:
        layers.order(fqn)
    for fqn in (EMBEDDING, "decoder.final_layernorm.weight"):
        if fqn not in names:
            raise LossError("the source lacks a tensor every Megatron-DeepSpeed model has", fqn=fqn)
    return layers


def _grid(args: Mapping[str, Any], layout: Layout) -> Grid:
    options = layout.read(MegatronOptions)
    for name, value in vars(options).items():
        if name not in ("tp", "pp", *STAGE_ARGS, "make_vocab_size_divisible_by") and value not in (None, 1):
            raise UsageError(
                "Megatron-DeepSpeed pipelines do not support this layout",
                expected=Message("{tp}, {pp}, {world_size}, the layers per stage and the vocabulary padding"),
                found=Message("{}", Keyword(name, value)),
                hint=Message("leave {} out", Keyword.without_value(name, value)),
            )
    source = Grid.of_args(args)
    grid = Grid(options.tp or source.tp, options.pp or source.pp)
    if grid.pp == 1 and (dealt := [name for name in STAGE_ARGS if getattr(options, name)]):
        option = Message("{}", Keyword.without_value(dealt[0], getattr(options, dealt[0])))
        hint = Message("leave {} out", option)
        raise UsageError("one pipeline stage has all layers", expected=Message("{pp} above 1"), found=option, hint=hint)
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    if any(isinstance(count, int) and count % grid.tp for count in (heads, groups)):
        raise UsageError(
            "the tensor parallel size does not divide the attention heads",
            expected=Message("heads and query groups that {tp} divides"),
            found=f"{heads} heads, {groups or heads} query groups, tp {grid.tp}",
        )
    return grid


def _stages(num_layers: int, grid: Grid, layout: Layout, recorded: Any) -> Stages:
    """Return the requested stages, or the source's if their number fits, or balanced ones."""
    if num_layers < grid.pp:
        what, hint = "the model has fewer layers than pipeline stages", Message("a smaller {pp}")
        raise UsageError(what, expected=Message("{pp} or less", pp=num_layers), hint=hint)
    even = Stages(num_layers, grid.pp)
    requested = {name: value for name in STAGE_ARGS if (value := getattr(layout.read(MegatronOptions), name))}
    if requested:
        return even.with_args(requested).check()
    counts = recorded if recorded and len(recorded) == grid.pp else balanced(num_layers, grid.pp)
    return replace(even, layout=tuple(("decoder",) * count for count in counts))


def balanced(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers per stage: the remainder goes to the first.

    Both libraries use `partition_balanced` with `type:transformer` by default.
    """
    each, rest = divmod(num_layers, num_stages)
    return [each + (stage < rest) for stage in range(num_stages)]


def _data_parallel_size(checkpoint: Checkpoint, grid: Grid, layout: Layout) -> int:
    slices = grid.tp * grid.pp
    num_ranks = layout.world_size or checkpoint.world_size or slices
    if num_ranks % slices:
        raise UsageError(
            f"{pluralize(num_ranks, 'rank')} do not divide into this layout",
            expected=f"a multiple of TP x PP, {slices}",
            found=Message("{world_size}", world_size=num_ranks)
            if layout.world_size
            else f"{pluralize(num_ranks, 'rank')} in the source",
            hint=Message("pass {world_size=N}"),
        )
    return num_ranks // slices


def _check(pipeline: _Pipeline, args: Mapping[str, Any]) -> None:
    if pipeline.has_optimizer and pipeline.checkpoint.facts_of(DeepSpeedFacts).own_module_order:
        raise LossError(
            f"{OTHER_ORDER}, and partitions are cut from parameters in their order",
            path=pipeline.checkpoint.path,
            hint="convert the weights alone, by way of hf",
        )
    rows = (".linear_proj.bias", ".linear_fc2.bias")
    biases = [fqn for fqn in pipeline.tensors if fqn.endswith(rows)] if pipeline.layers.neox else []
    if biases and pipeline.grid.tp > 1:
        says = "each would need a part missing from every source rank"
        if not args.get("gpt_j_residual"):
            says = "the source does not record that option"
        raise LossError(
            f"under --gpt-j-residual GPT-NeoX adds up the ranks' biases of this layer, and {says}",
            fqn=biases[0],
            hint=Message("{tp=1}"),
        )


# -- files ---------------------------------------------------------------------------------------------------

#: Name in the step folder, and the object for torch.load.
_File = tuple[str, dict[Any, Any]]


def _layer_files(pipeline: _Pipeline) -> Iterator[_File]:
    """Follow runtime/pipe/module.py, `save_state_dict`."""
    entries: dict[int, list[tuple[str, str]]] = {number: [] for number in pipeline.layers.kinds}
    for fqn in pipeline.tensors:
        place = pipeline.layers.place(fqn)
        assert place is not None
        entries[place[0]].append((place[1], fqn))
    for number, names in entries.items():
        for tp in range(pipeline.grid.tp):
            parts = ((name, _part(pipeline.tensors[fqn], pipeline.local(fqn, tp))) for name, fqn in names)
            state = StoredDict("OrderedDict", parts)
            state.update(pipeline.record.get("recomputed", {}).get(number, {}))
            yield f"layer_{number:02d}-model_{tp:02d}-model_states.pt", state


def _part(choice: Choice, local: LocalParameter) -> NewTensor:
    parts, at = [], 0
    for box in local.boxes:
        parts.append(FromSource(choice.key, box, at))
        at += box.numel
    return NewTensor(choice.dtype, local.shape, tuple(parts))


def _slice_files(pipeline: _Pipeline, client: Mapping[str, Any], pp: int, tp: int) -> Iterator[_File]:
    model, config, dp = pipeline.model, pipeline.config, pipeline.dp
    number = pp * pipeline.grid.tp + tp
    local = {fqn: pipeline.local(fqn, tp) for fqn in pipeline.members[pp]}
    groups = list(_slice_groups(pipeline, local)) if pipeline.has_optimizer else []
    shapes = [group.shapes(model) for group in groups]
    if not pipeline.has_optimizer:
        shapes = [StoredDict("OrderedDict", ((one.name, Size(one.shape)) for one in local.values()))]
    root = common_root(model, config, dp, shapes, tp=pipeline.grid.tp, pp=pipeline.grid.pp)
    yield f"mp_rank_{number:02d}_model_states.pt", {**root, **client, **_slice_entry(pipeline, number)}
    if not pipeline.has_optimizer:
        return
    items = stage12_items(model, config, [dp] * len(groups), 1)
    for rank in range(dp):
        yield optimizer_file(model, config, items | partitions(model, groups, [rank] * len(groups)), rank, number)


def _slice_groups(pipeline: _Pipeline, local: Mapping[str, LocalParameter]) -> Iterator[FlattenedGroup]:
    for group in pipeline.model.groups:
        members = set(group.fqns)
        fqns = tuple(fqn for fqn in local if fqn in members)
        if fqns:
            yield flat_group(pipeline.model, pipeline.config, ParamGroup(fqns, group.options), pipeline.dp, local)


# -- state ---------------------------------------------------------------------------------------------------


def _client(pipeline: _Pipeline) -> tuple[dict[str, Any], list[str]]:
    """Keep other formats' entries only if they have a place in DeepSpeed's files."""
    model, checkpoint = pipeline.model, pipeline.checkpoint
    sizes = _sizes(pipeline)
    if model.is_deepspeed:
        client, dropped = zero_model.client_state(model)
        stated = checkpoint.state.client_state or {}
        if UNIVERSAL_INFO in stated and pipeline.record:
            client[UNIVERSAL_INFO] = stated[UNIVERSAL_INFO]
            dropped = [line for line in dropped if repr(UNIVERSAL_INFO) not in line]
    else:
        known = (*MODEL_STATE, *OPTIMIZER_STATE, "args", "ds_config", "train_state")
        client, dropped = {}, [f"training state {name}" for name in checkpoint.state.entries() if name not in known]
    if "args" in client:
        client["args"] = recorded(client["args"], sizes)
    elif not pipeline.record and pipeline.layers.neox:
        client["args"] = of_neox(checkpoint.state.args or {}, sizes)
    elif not pipeline.record:
        client["args"] = namespace(checkpoint.state.args or {}, sizes)
        client["checkpoint_version"] = 3.0  # readers rely on it for query_key_value's row order
    client.setdefault("iteration", checkpoint.state.step or 0)
    of_slices = pipeline.record.get("of_slices", {})
    if of_slices and not _keeps_slices(pipeline):
        dropped.append(f"{', '.join(of_slices)}: the layout differs; resume with --no-load-rng")
    return client, dropped


def _sizes(pipeline: _Pipeline) -> dict[str, Any]:
    grid = pipeline.grid
    return {
        "num_layers": len(pipeline.layers.transformers),
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "data_parallel_size": pipeline.dp,
        "world_size": grid.tp * grid.pp * pipeline.dp,
        "padded_vocab_size": pipeline.tensors[EMBEDDING].tensor.shape[0],
        "untie_embeddings_and_output_weights": not pipeline.layers.tied,
    }


def _keeps_slices(pipeline: _Pipeline) -> bool:
    source = Grid.of_args(pipeline.checkpoint.state.args or {})
    return (source.tp, source.pp) == (pipeline.grid.tp, pipeline.grid.pp)


def _slice_entry(pipeline: _Pipeline, number: int) -> dict[str, Any]:
    if not _keeps_slices(pipeline):
        return {}
    found = pipeline.record.get("of_slices", {})
    return {name: of_ranks[number] for name, of_ranks in found.items() if number in of_ranks}


def _pipeline_notes(pipeline: _Pipeline) -> Iterator[str]:
    grid, before = pipeline.grid, pipeline.checkpoint.world_size
    ranks = grid.tp * grid.pp * pipeline.dp
    changed = f", from {pluralize(before, 'rank')}" if before not in (None, ranks) else ""
    yield Brief(f"DeepSpeed's pipeline for TP {grid.tp}, PP {grid.pp}, DP {pipeline.dp}{changed}")
    if pipeline.has_optimizer:
        yield from master_notes(pipeline.model)
    counts = [len(pipeline.stages.layers(pp)) for pp in range(grid.pp)]
    if len(set(counts)) > 1:
        yield f"transformer layers of the stages: {', '.join(map(str, counts))}"
    yield from batch_notes(pipeline.config, pipeline.dp)
    if pipeline.layers.neox and not pipeline.record:
        yield (
            "wrote GPT-NeoX's names from before September 2024 (commit 0d4bdb96): only they support this model's "
            "parallel residual (gpt_j_residual). Load this with "
            + ("no_load_rng" if pipeline.has_optimizer and pipeline.checkpoint.state.step else "finetune")
        )
    if not pipeline.layers.neox:
        yield (
            "query_key_value rows are ordered by head, for Megatron-DeepSpeed before December 2024: commit 676a482c "
            "and later read another order and would train a wrong model"
        )
    if pipeline.layers.tied and grid.pp > 1 and _POSITIONS in pipeline.tensors:
        yield f"the last stage's own {_POSITIONS} is a copy from the first stage; nothing reads it"
