"""Megatron's model as its ranks hold it: which tensors are in a chunk, under which names, which boxes of the whole.

What the readers and the writers of Megatron's formats share.  Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import counted
from ckpt.containers.torchfile.write import FromSource
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, Key, Layout
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Box, Extent, Fragment, Shape, contiguous_strides
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import STAGE_ARGS, Grid, Rank, Stages, expert_range
from converters.names.megatron.model.spelling import (
    EMBEDDING,
    OUTPUT,
    LayerKind,
    Spelling,
    expert_of,
    in_encoder,
    in_whole_model,
    is_beside,
    is_encoders,
    is_expert,
    layer_kinds,
    registered,
    split_layer,
)
from converters.names.megatron.model.splits import (
    GateBlocks,
    Split,
    in_model_order,
    known_split,
    packed,
    rank_boxes,
    rank_shape,
    sections_of,
)
from converters.names.megatron.options import MegatronOptions

#: The entry of the training state that names modules with a state of their own: Transformer Engine's FP8 scaling.
EXTRA = "_extra_state"
#: Endings of the names of buffers.
BUFFERS = (".expert_bias",)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LINEAR = re.compile(r"(?P<module>.*\.(?:linear_\w+|eh_proj|in_proj|out_proj))\.weight")
_NORM = re.compile(r"(?P<module>(?:.*\.)?(?<!\.mixer\.)(?<!lm_head\.)\w*norm)\.weight")
#: What Megatron-LM builds layers from where nothing else is said.
_ENGINE = "transformer_engine"


def are_experts_apart(grid: Grid, args: Mapping[str, Any]) -> bool:
    """Whether experts have an optimizer of their own: where other ranks share them than dense parameters.

    Up to 0.18 megatron-core did so for expert parallelism alone (tensor_parallel/layers.py, `allreduce`).  Since 0.19
    there is the argument.
    """
    return grid.ep > 1 or (grid.etp != grid.tp and "gtp_weight_remat_size" in args)


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Box `box` of a tensor of the whole model, in a rank's own tensor: from element `offset` on, with `strides`."""

    box: Box
    offset: int
    strides: Shape

    def of(self, extent: Extent, rank: int) -> Fragment:
        """The piece in a contiguous extent that holds the rank's tensor."""
        offset = extent.offset + self.offset * extent.dtype.itemsize
        return Fragment(self.box, Extent(extent.path, offset, extent.dtype, self.box.sizes, self.strides), rank)


@lru_cache(8192)  # the same few shapes for thousands of experts
def pieces_of(split: Split, shape: Shape, size: int, rank: int) -> tuple[ChunkPiece, ...]:
    """What rank `rank` of `size` holds of a tensor of `shape`, in its own contiguous tensor.

    UsageError where the tensor does not divide.
    """
    pieces, at = [], 0
    for box in rank_boxes(split, shape, size, rank):
        pieces.append(ChunkPiece(box, at, contiguous_strides(box.sizes)))
        at += box.numel
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class ChunkTensor:
    """A tensor of a chunk on one rank: its own name there, its name in the whole model, and the pieces it holds.

    `shared` marks a copy of the embedding that is kept equal on two stages.
    """

    name: str
    fqn: str
    shape: Shape
    pieces: tuple[ChunkPiece, ...]
    shared: bool

    @property
    def numel(self) -> int:
        return sum(piece.box.numel for piece in self.pieces)


@dataclass(frozen=True)
class Chunk:
    """A model chunk of one rank: its tensors in the order of the modules, and the names of empty extra states."""

    vp: int
    tensors: tuple[ChunkTensor, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A tensor of a chunk, on whichever tensor parallel rank."""

    name: str
    fqn: str
    shared: bool
    shape: Shape
    split: Split
    expert: bool


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint as Megatron's model, and the layout that it has or is to have."""

    checkpoint: Checkpoint
    args: Mapping[str, Any]
    grid: Grid
    stages: Stages
    spelling: Spelling
    chosen: Mapping[str, Choice]
    kinds: Mapping[str, LayerKind]
    num_experts: int
    _lists: dict[tuple[int, int, int], tuple[list[_Listed], tuple[str, ...]]] = field(default_factory=dict)

    @property
    def tied(self) -> bool:
        return OUTPUT not in self.chosen

    @property
    def blocks(self) -> GateBlocks:
        """GateBlocks in which the ranks keep gate and up rows."""
        return self.checkpoint.facts_of(MegatronFacts).blocks

    @cached_property
    def sees(self) -> bool:
        """Whether the GPTModel is only the language model in it, and is called so in its files."""
        return any(map(is_beside, self.chosen))

    @cached_property
    def encodes(self) -> bool:
        """Whether it is a BertModel, whose files have another name for its layers."""
        return any(map(is_encoders, self.chosen))

    @property
    def name_in_files(self) -> Callable[[str], str]:
        """What makes the name that a tensor has in the model's files."""
        return in_whole_model if self.sees else in_encoder if self.encodes else str

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts, spread over ranks, have an optimizer of their own."""
        return self.num_experts > 0 and are_experts_apart(self.grid, self.args)

    @cached_property
    def has_optimizer(self) -> bool:
        return any(role not in MODEL_ROLES for _, role in self.checkpoint.tensors)

    @cached_property
    def members(self) -> dict[tuple[int, int], list[str]]:
        """Names of the whole model's tensors in every chunk, copies of the embedding not among them."""
        found: dict[tuple[int, int], list[str]] = {place: [] for place in self._places}
        for name in (*self.chosen, *self.extra):
            found[self._home(name)].append(name)
        return found

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """Names of entries without content, `_extra_state`: the source's, or those that linear layers have."""
        state = self.checkpoint.state
        recorded, args = state.private.get("megatron", {}).get(EXTRA), state.args or {}
        if isinstance(recorded, Mapping) and args.get("transformer_impl", _ENGINE) == self.args["transformer_impl"]:
            return tuple(name for name in recorded if isinstance(name, str))
        found = {_extra_name(module, self.spelling): None for module in modules_with_extra(self.chosen, self.spelling)}
        return (*found, f"output_layer.{EXTRA}")

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """(pipeline rank, chunk) of each chunk, in the order of the model."""
        return [(pp, vp) for vp in range(self.grid.vpp) for pp in range(self.grid.pp)]

    @cached_property
    def _stage_of_layer(self) -> dict[str, tuple[int, int]]:
        """The place of each decoder layer, by its number as names have it."""
        return {str(layer): place for place in self._places for layer in self.stages.layers(*place)}

    def _home(self, name: str) -> tuple[int, int]:
        """The place of a tensor."""
        if match := _LAYER.match(name):
            return self._stage_of_layer[match[1]]
        if name.startswith("embedding.") or is_beside(name):
            return 0, 0
        if name.startswith("mtp."):
            return next((place for place in self._places if self.stages.has_mtp(*place)), self._places[-1])
        if name.startswith("decoder."):
            return next(place for place in self._places if self.stages.has_final_norm(*place))
        return self._places[-1]

    def chunks(self, rank: Rank) -> list[Chunk]:
        """What a rank's chunks hold.

        Raises LossError for an unknown tensor, UsageError for one that does not divide.
        """
        return [self._chunk(rank, vp) for vp in range(self.grid.vpp)]

    def _chunk(self, rank: Rank, vp: int) -> Chunk:
        where = rank.pp, vp, rank.ep
        if where not in self._lists:
            self._lists[where] = self._list(*where)
        listed, extra = self._lists[where]
        tensors = []
        for one in listed:
            size, part = (self.grid.etp, rank.etp) if one.expert else (self.grid.tp, rank.tp)
            try:
                shape, pieces = rank_shape(one.split, one.shape, size), pieces_of(one.split, one.shape, size, part)
            except UsageError as error:
                error.fqn = one.fqn
                raise
            tensors.append(ChunkTensor(one.name, one.fqn, shape, pieces, one.shared))
        return Chunk(vp, tuple(tensors), extra)

    def _list(self, pp: int, vp: int, ep: int) -> tuple[list[_Listed], tuple[str, ...]]:
        """The tensors of a chunk in the order of its modules, and its extra states."""
        experts = expert_range(ep, self.grid, self.num_experts)
        first_layer = self.stages.layers(pp, vp).start
        listed, extra = [], []
        for fqn in self.members[pp, vp]:
            expert = expert_of(fqn)
            if expert is not None and expert not in experts:
                continue
            own = self.spelling.spelled(fqn, self.kinds.get(split_layer(fqn)[0]), first_layer, experts.start)
            if fqn.endswith("_extra_state"):
                extra.append(own)
            else:
                listed.append(self._listed(own, fqn, self._is_shared(fqn)))
        listed += [self._listed(*copy) for copy in self._copies(pp, vp)]
        return sorted(listed, key=lambda one: registered(one.name)), tuple(dict.fromkeys(extra))

    def _is_shared(self, fqn: str) -> bool:
        """Whether another stage keeps a copy: language_module.py, `setup_embeddings_and_output_layer`."""
        return fqn == EMBEDDING and self.grid.pp > 1 and (self.tied or self.stages.num_mtp > 0)

    def _copies(self, pp: int, vp: int) -> Iterator[tuple[str, str, bool]]:
        """Copies of the embedding on later stages: (own name, name in the model, kept equal)."""
        if self.grid.pp == 1 or self.stages.is_first(pp, vp):
            return
        if self.stages.has_mtp(pp, vp):
            for name in self.chosen:
                if name.startswith("embedding."):
                    yield name, name, name == EMBEDDING
        if self.tied and self.stages.is_last(pp, vp):
            yield OUTPUT, EMBEDDING, not self.stages.has_mtp(pp, vp)

    def _listed(self, own: str, fqn: str, shared: bool) -> _Listed:
        block = self.blocks.of(fqn)
        split = known_split(fqn, sections=self.sections(fqn), local_spec=self.spelling.local_spec, block=block)
        return _Listed(own, fqn, shared, self.chosen[fqn].tensor.shape, split, is_expert(fqn))

    def fill(self, key: Key, box: Box) -> tuple[FromSource, ...]:
        """Return the source of `box` of a tensor that is stored whole, with its ranks' gate and up rows in blocks."""
        fqn, shape = key[0], self.checkpoint.tensors[key].shape
        block = self.blocks.of(fqn)
        if block is None:
            return (FromSource(key, box),)
        each, size = prod(box.sizes[1:]), self.grid.etp if is_expert(fqn) else self.grid.tp
        parts = in_model_order(box, shape[0], size, block)
        return tuple(FromSource(key, inner, own.offsets[0] * each) for own, inner in parts)

    def sections(self, fqn: str) -> tuple[int, ...]:
        """The sections of a tensor's rows: see `splits.sections_of`."""
        return sections_of(fqn, self._shape, gated=bool(self.args.get("swiglu")))

    def _shape(self, fqn: str) -> Shape | None:
        return self.chosen[fqn].tensor.shape if fqn in self.chosen else None


def modules_with_extra(names: Iterable[str], spelling: Spelling) -> Iterator[str]:
    """The modules of a whole model of these tensors that have an extra state; the output layer is not among them.

    Linear ones have one, and of Transformer Engine's layers also attention and norms that stand by themselves.
    """
    for name in names:
        if is_beside(name):
            continue
        if match := _LINEAR.fullmatch(name):
            yield match["module"]
        if spelling.local_spec:
            continue
        if name.endswith(".self_attention.linear_proj.weight"):
            yield name.replace(".linear_proj.weight", ".core_attention")
        elif match := _NORM.fullmatch(name):
            yield match["module"]


def _extra_name(module: str, spelling: Spelling) -> str:
    """A module's entry; grouped experts are one module."""
    if spelling.grouped:
        module = re.sub(r"\.local_experts\.\d+\.", ".", module)
    return f"{module}.{EXTRA}"


def describe_model(checkpoint: Checkpoint, layout: Layout) -> MegatronModel:
    """The source's tensors, and the layout to write them in.

    Raises UsageError for a layout that does not fit the model.
    """
    args: dict[str, Any] = dict(checkpoint.state.args or {})
    if args.get("gpt_j_residual"):
        raise LossError(
            "megatron-core has no parallel residual, and would compute something else with these weights",
            path=checkpoint.path,
            expected="use_parallel_residual false",
            found="use_parallel_residual true",
            hint="GPT-NeoX has one, whose files the format megatron-deepspeed writes",
        )
    chosen = choices(checkpoint, layout.dtype)
    names = list(chosen)
    layers = {int(m[1]) for name in names if (m := _LAYER.match(name))}
    experts = {number for name in names if (number := expert_of(name)) is not None}
    for what, numbers in (("layers", layers), ("experts", experts)):
        if numbers != set(range(len(numbers))):
            missing = next(number for number in range(max(numbers)) if number not in numbers)
            raise LossError(f"the source lacks some of the model's {what}", expected=f"number {missing}")
    options = layout.read(MegatronOptions)
    grid = _grid(args, options)
    if grid.ep > 1 and not experts:  # megatron/core/transformer/transformer_config.py refuses this too
        raise UsageError("a model without experts has no expert parallel ranks", found=f"ep {grid.ep}", hint="--ep 1")
    stages = _stages(args, grid, options, len(layers))
    if options.transformer_impl:
        args["transformer_impl"] = options.transformer_impl
    local = args.setdefault("transformer_impl", _ENGINE) == "local"
    _check_packed(args, grid, stages, chosen, local)
    grouped = bool(args.get("moe_grouped_gemm"))
    if grouped and experts and (local or args.get("moe_use_legacy_grouped_gemm")):
        raise LossError(
            "the legacy grouped GEMM's weights are not written: megatron-core 0.17 has left that layout",
            expected="experts one by one, or grouped in Transformer Engine's way",
            found="moe_grouped_gemm with " + ("transformer_impl local" if local else "moe_use_legacy_grouped_gemm"),
        )
    if args.get("untie_embeddings_and_output_weights") and OUTPUT not in chosen:
        raise LossError(
            "the arguments say that the output layer is not the embedding, and the source has none", fqn=OUTPUT
        )
    return MegatronModel(
        checkpoint,
        _args(args, grid, stages, checkpoint, layout, chosen),
        grid,
        stages,
        Spelling(local, grouped),
        chosen,
        layer_kinds(names),
        len(experts),
    )


def refuse_encoder(model: MegatronModel, form: str) -> None:
    """LossError for a BertModel, which is not written in every form."""
    if model.encodes:
        raise LossError(
            f"a BertModel is not written as {form}",
            path=model.checkpoint.path,
            hint="--ckpt-format torch or torch_dist",
        )


def _check_packed(
    args: Mapping[str, Any], grid: Grid, stages: Stages, chosen: Mapping[str, Choice], local: bool
) -> None:
    """Refuse layouts of models with packed layers that megatron-core does not build."""
    hybrid = next(filter(packed, chosen), None)
    if hybrid is None:
        return
    if local:
        raise LossError(
            "megatron-core builds layers like this one of Transformer Engine's alone",
            fqn=hybrid,
            expected="transformer_impl transformer_engine",
            found="transformer_impl local",
        )
    mixer = next((name for name in chosen if ".mixer." in name), None)
    name = "linear_num_key_heads" if mixer is None else "mamba_num_groups"
    if (count := args.get(name)) and count % grid.tp:  # the rows may divide where these do not
        raise UsageError(
            "a tensor parallel rank has whole heads and groups of a packed layer, and these do not divide",
            fqn=hybrid,
            expected=f"{name} to be a multiple of --tp",
            found=f"{name} {count}, tp {grid.tp}",
            hint="another --tp",
        )
    if mixer is None:
        return
    if grid.vpp > 1:
        raise UsageError(
            "megatron-core's MambaModel has one chunk on each pipeline rank",
            fqn=mixer,
            hint="--vpp 1, or without --vpp",
        )
    if grid.pp > 1 and (stages.layout is not None or stages.embedding or stages.loss):
        raise UsageError(
            "megatron-core's MambaModel deals layers to stages by their number alone",
            fqn=mixer,
            expected="no layout of the pipeline, and neither embedding nor loss counted as a layer",
            hint="use --decoder-first-pipeline-num-layers N and --decoder-last-pipeline-num-layers N instead",
        )


def _grid(args: Mapping[str, Any], options: MegatronOptions) -> Grid:
    """The sizes that were asked for, and otherwise the source's."""
    source = Grid.of_args(args)
    tp, pp = options.tp or source.tp, options.pp or source.pp
    etp = options.etp or (tp if source.etp == source.tp else source.etp)
    vpp = options.vpp or (source.vpp if pp > 1 else 1)
    grid = Grid(tp, pp, options.ep or source.ep, vpp, etp)
    grid.check()
    heads, groups = args.get("num_attention_heads"), args.get("num_query_groups")
    if heads and (heads % tp or (args.get("group_query_attention") and groups and groups % tp and tp % groups)):
        raise UsageError(
            "attention does not divide among the tensor parallel ranks",
            expected="heads that --tp divides, and query groups that it divides or that divide it",
            found=f"{heads} heads, {groups} query groups, tp {tp}",
            hint="another --tp",
        )
    return grid


def _stages(args: Mapping[str, Any], grid: Grid, options: MegatronOptions, num_layers: int) -> Stages:
    """Pipeline stages as asked for; otherwise the source's where they fit, and even ones where they do not."""
    even = Stages(num_layers, grid.pp, grid.vpp, num_mtp=args.get("mtp_num_layers") or 0)
    asked = {name: value for name in STAGE_ARGS if (value := getattr(options, name, None))}
    if asked:
        return even.with_args(asked).check()
    recorded = {name: value for name in STAGE_ARGS if (value := args.get(name))}
    if recorded and grid.pp > 1:
        kept = even.with_args(recorded)
        with suppress(UsageError):
            return kept.check()
    try:
        return even.check()
    except UsageError as error:
        error.hint = "--pp and --vpp that divide the layers, or --decoder-first-pipeline-num-layers and its like"
        raise


def _args(
    args: Mapping[str, Any],
    grid: Grid,
    stages: Stages,
    checkpoint: Checkpoint,
    layout: Layout,
    chosen: Mapping[str, Choice],
) -> dict[str, Any]:
    """The source's arguments with the target's layout."""
    result = {**args, **grid.args, "num_layers": stages.num_layers}
    even = grid.vpp > 1 and stages == replace(stages, first=None, last=None, embedding=False, loss=False, layout=None)
    result["num_layers_per_virtual_pipeline_stage"] = stages.num_layers // (grid.pp * grid.vpp) if even else None
    result["transformer_pipeline_model_parallel_size"] = grid.pp
    result |= {
        "decoder_first_pipeline_num_layers": stages.first,
        "decoder_last_pipeline_num_layers": stages.last,
        "account_for_embedding_in_pipeline_split": stages.embedding,
        "account_for_loss_in_pipeline_split": stages.loss,
    }
    if stages.layout is None:
        result["pipeline_model_parallel_layout"] = None
    elif asked := layout.read(MegatronOptions).pipeline_model_parallel_layout:
        result["pipeline_model_parallel_layout"] = asked
    result["untie_embeddings_and_output_weights"] = OUTPUT in chosen
    if EMBEDDING in chosen:
        result["padded_vocab_size"] = chosen[EMBEDDING].tensor.shape[0]
    world_size = layout.world_size or checkpoint.world_size
    model_ranks = grid.tp * grid.pp * (args.get("context_parallel_size") or 1)
    if layout.world_size and layout.world_size % (grid.pp * grid.ranks_in_stage):
        raise UsageError(
            f"{counted(layout.world_size, 'rank')} do not divide into this layout",
            expected=f"a multiple of {grid.pp * grid.ranks_in_stage}",
            found=f"--world-size {layout.world_size}",
            hint="another --world-size, --tp or --pp",
        )
    if not world_size or world_size % model_ranks or world_size % (grid.pp * grid.ranks_in_stage):
        world_size = grid.pp * grid.ranks_in_stage
    result["world_size"] = world_size
    result["data_parallel_size"] = max(1, world_size // model_ranks)
    return result
