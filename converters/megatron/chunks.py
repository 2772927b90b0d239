"""Megatron's model on its ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
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
    is_encoders,
    is_expert,
    is_outside_language_model,
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

#: Modules' own state: Transformer Engine's FP8 scaling.
EXTRA = "_extra_state"
BUFFERS = (".expert_bias",)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LINEAR = re.compile(r"(?P<module>.*\.(?:linear_\w+|eh_proj|in_proj|out_proj))\.weight")
_NORM = re.compile(r"(?P<module>(?:.*\.)?(?<!\.mixer\.)(?<!lm_head\.)\w*norm)\.weight")
#: Megatron-LM's default layers.
_ENGINE = "transformer_engine"


def are_experts_apart(grid: Grid, args: Mapping[str, Any]) -> bool:
    """Return True if experts have their own optimizer, because different ranks share them.

    Up to 0.18 megatron-core did this only for expert parallelism (tensor_parallel/layers.py, `allreduce`). Since 0.19
    there is an argument for it.
    """
    return grid.ep > 1 or (grid.etp != grid.tp and "gtp_weight_remat_size" in args)


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Box of a whole tensor, at element `offset` with `strides` in a rank's tensor."""

    box: Box
    offset: int
    strides: Shape

    def of(self, extent: Extent, rank: int) -> Fragment:
        offset = extent.offset + self.offset * extent.dtype.itemsize
        return Fragment(self.box, Extent(extent.path, offset, extent.dtype, self.box.sizes, self.strides), rank)


@lru_cache(8192)  # thousands of experts share few shapes
def pieces_of(split: Split, shape: Shape, size: int, rank: int) -> tuple[ChunkPiece, ...]:
    """Raise UsageError if the tensor does not divide."""
    pieces, at = [], 0
    for box in rank_boxes(split, shape, size, rank):
        pieces.append(ChunkPiece(box, at, contiguous_strides(box.sizes)))
        at += box.numel
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class ChunkTensor:
    """Tensor on one rank. `shared` marks a copy of the embedding kept equal on two stages."""

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
    """Model chunk on one rank: tensors in module order, and the names of empty extra states."""

    vp: int
    tensors: tuple[ChunkTensor, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Listed:
    name: str
    fqn: str
    shared: bool
    shape: Shape
    split: Split
    expert: bool


@dataclass(frozen=True)
class MegatronModel:
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
        return self.checkpoint.facts_of(MegatronFacts).blocks

    @cached_property
    def sees(self) -> bool:
        """True if the GPTModel is only the language model of a larger model."""
        return any(map(is_outside_language_model, self.chosen))

    @cached_property
    def encodes(self) -> bool:
        """True for a BertModel, whose files name its layers differently."""
        return any(map(is_encoders, self.chosen))

    @property
    def name_in_files(self) -> Callable[[str], str]:
        return in_whole_model if self.sees else in_encoder if self.encodes else str

    @property
    def has_expert_optimizer(self) -> bool:
        return self.num_experts > 0 and are_experts_apart(self.grid, self.args)

    @cached_property
    def has_optimizer(self) -> bool:
        return any(role not in MODEL_ROLES for _, role in self.checkpoint.tensors)

    @cached_property
    def members(self) -> dict[tuple[int, int], list[str]]:
        """Names in every chunk, without copies of the embedding."""
        found: dict[tuple[int, int], list[str]] = {place: [] for place in self._places}
        for name in (*self.chosen, *self.extra):
            found[self._home(name)].append(name)
        return found

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """Names of empty `_extra_state` entries: the source's, or the linear layers'."""
        state = self.checkpoint.state
        recorded, args = state.private.get("megatron", {}).get(EXTRA), state.args or {}
        if isinstance(recorded, Mapping) and args.get("transformer_impl", _ENGINE) == self.args["transformer_impl"]:
            return tuple(name for name in recorded if isinstance(name, str))
        found = {_extra_name(module, self.spelling): None for module in modules_with_extra(self.chosen, self.spelling)}
        return (*found, f"output_layer.{EXTRA}")

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """(pipeline rank, chunk) for each chunk, in model order."""
        return [(pp, vp) for vp in range(self.grid.vpp) for pp in range(self.grid.pp)]

    @cached_property
    def _stage_of_layer(self) -> dict[str, tuple[int, int]]:
        return {str(layer): place for place in self._places for layer in self.stages.layers(*place)}

    def _home(self, name: str) -> tuple[int, int]:
        if match := _LAYER.match(name):
            return self._stage_of_layer[match[1]]
        if name.startswith("embedding.") or is_outside_language_model(name):
            return 0, 0
        if name.startswith("mtp."):
            return next((place for place in self._places if self.stages.has_mtp(*place)), self._places[-1])
        if name.startswith("decoder."):
            return next(place for place in self._places if self.stages.has_final_norm(*place))
        return self._places[-1]

    def chunks(self, rank: Rank) -> list[Chunk]:
        """Return a rank's chunks.

        Raise LossError for an unknown tensor, UsageError if a tensor does not divide.
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
        """Return True if another stage keeps a copy: language_module.py, `setup_embeddings_and_output_layer`."""
        return fqn == EMBEDDING and self.grid.pp > 1 and (self.tied or self.stages.num_mtp > 0)

    def _copies(self, pp: int, vp: int) -> Iterator[tuple[str, str, bool]]:
        """Yield the embedding's copies on later stages: (local name, model name, kept equal)."""
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
        """Return the source of `box`, following ranks' gate and up blocks."""
        fqn, shape = key[0], self.checkpoint.tensors[key].shape
        block = self.blocks.of(fqn)
        if block is None:
            return (FromSource(key, box),)
        each, size = prod(box.sizes[1:]), self.grid.etp if is_expert(fqn) else self.grid.tp
        parts = in_model_order(box, shape[0], size, block)
        return tuple(FromSource(key, inner, own.offsets[0] * each) for own, inner in parts)

    def sections(self, fqn: str) -> tuple[int, ...]:
        return sections_of(fqn, self._shape, gated=bool(self.args.get("swiglu")))

    def _shape(self, fqn: str) -> Shape | None:
        return self.chosen[fqn].tensor.shape if fqn in self.chosen else None


def modules_with_extra(names: Iterable[str], spelling: Spelling) -> Iterator[str]:
    """Yield modules with an extra state, except the output layer.

    These are linear layers, and with Transformer Engine also attention and separate norms.
    """
    for name in names:
        if is_outside_language_model(name):
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
    if spelling.grouped:
        module = re.sub(r"\.local_experts\.\d+\.", ".", module)
    return f"{module}.{EXTRA}"


def describe_model(checkpoint: Checkpoint, layout: Layout) -> MegatronModel:
    args: dict[str, Any] = dict(checkpoint.state.args or {})
    if args.get("gpt_j_residual"):
        raise LossError(
            "megatron-core has no parallel residual, so it would compute something else with these weights",
            path=checkpoint.path,
            expected="use_parallel_residual false",
            found="use_parallel_residual true",
            hint="use the format megatron-deepspeed: GPT-NeoX has a parallel residual",
        )
    chosen = choices(checkpoint, layout.dtype)
    names = list(chosen)
    layers = {int(m[1]) for name in names if (m := _LAYER.match(name))}
    experts = {number for name in names if (number := expert_of(name)) is not None}
    for what, numbers in (("layers", layers), ("experts", experts)):
        if numbers != set(range(len(numbers))):
            missing = next(number for number in range(max(numbers)) if number not in numbers)
            raise LossError(f"the source lacks some {what}", expected=f"number {missing}")
    options = layout.read(MegatronOptions)
    grid = _grid(args, options)
    if grid.ep > 1 and not experts:  # as in megatron/core/transformer/transformer_config.py
        raise UsageError(
            "a model without experts has no expert parallel ranks", found=f"ep {grid.ep}", hint=Message("{ep=1}")
        )
    stages = _stages(args, grid, options, len(layers))
    if options.transformer_impl:
        args["transformer_impl"] = options.transformer_impl
    local = args.setdefault("transformer_impl", _ENGINE) == "local"
    _check_packed(args, grid, stages, chosen, local)
    grouped = bool(args.get("moe_grouped_gemm"))
    if grouped and experts and (local or args.get("moe_use_legacy_grouped_gemm")):
        raise LossError(
            "weights for the legacy grouped GEMM can't be written: megatron-core 0.17 removed this layout",
            expected="experts one by one, or grouped in Transformer Engine's way",
            found="moe_grouped_gemm with " + ("transformer_impl local" if local else "moe_use_legacy_grouped_gemm"),
        )
    if args.get("untie_embeddings_and_output_weights") and OUTPUT not in chosen:
        raise LossError("the arguments untie the output layer, but the source has no output layer", fqn=OUTPUT)
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
    if model.encodes:
        raise LossError(
            f"{form} can't hold a BertModel",
            path=model.checkpoint.path,
            hint=Message("{ckpt_format=torch_dist}"),
        )


def _check_packed(
    args: Mapping[str, Any], grid: Grid, stages: Stages, chosen: Mapping[str, Choice], local: bool
) -> None:
    """Refuse layouts that megatron-core does not build."""
    hybrid = next(filter(packed, chosen), None)
    if hybrid is None:
        return
    if local:
        raise LossError(
            "megatron-core builds packed layers only with Transformer Engine",
            fqn=hybrid,
            expected="transformer_impl transformer_engine",
            found="transformer_impl local",
        )
    mixer = next((name for name in chosen if ".mixer." in name), None)
    name = "linear_num_key_heads" if mixer is None else "mamba_num_groups"
    if (count := args.get(name)) and count % grid.tp:  # the rows may divide anyway
        raise UsageError(
            "the tensor parallel size doesn't divide the packed layer's heads or groups",
            fqn=hybrid,
            expected=Message("{} divisible by {tp}", name),
            found=f"{name} {count}, tp {grid.tp}",
            hint=Message("another {tp}"),
        )
    if mixer is None:
        return
    if grid.vpp > 1:
        raise UsageError(
            "megatron-core's MambaModel has one chunk on each pipeline rank",
            fqn=mixer,
            hint=Message("{vpp=1}, or without {vpp}"),
        )
    if grid.pp > 1 and (stages.layout is not None or stages.embedding or stages.loss):
        raise UsageError(
            "megatron-core's MambaModel splits layers into stages only by their number",
            fqn=mixer,
            expected="no pipeline layout, and neither embedding nor loss counted in the stages",
            hint=Message("use {decoder_first_pipeline_num_layers=N} and {decoder_last_pipeline_num_layers=N} instead"),
        )


def _grid(args: Mapping[str, Any], options: MegatronOptions) -> Grid:
    source = Grid.of_args(args)
    tp, pp = options.tp or source.tp, options.pp or source.pp
    etp = options.etp or (tp if source.etp == source.tp else source.etp)
    vpp = options.vpp or (source.vpp if pp > 1 else 1)
    grid = Grid(tp, pp, options.ep or source.ep, vpp, etp)
    grid.check()
    heads, groups = args.get("num_attention_heads"), args.get("num_query_groups")
    if heads and (heads % tp or (args.get("group_query_attention") and groups and groups % tp and tp % groups)):
        raise UsageError(
            "the tensor parallel size does not divide the attention heads",
            expected=Message("heads divisible by {tp}, and query groups divisible by {tp} or dividing it"),
            found=f"{heads} heads, {groups} query groups, tp {tp}",
            hint=Message("another {tp}"),
        )
    return grid


def _stages(args: Mapping[str, Any], grid: Grid, options: MegatronOptions, num_layers: int) -> Stages:
    """Return the requested stages, or the source's if they fit, or even ones."""
    even = Stages(num_layers, grid.pp, grid.vpp, num_mtp=args.get("mtp_num_layers") or 0)
    requested = {name: value for name in STAGE_ARGS if (value := getattr(options, name, None))}
    if requested:
        return even.with_args(requested).check()
    recorded = {name: value for name in STAGE_ARGS if (value := args.get(name))}
    if recorded and grid.pp > 1:
        kept = even.with_args(recorded)
        with suppress(UsageError):
            return kept.check()
    try:
        return even.check()
    except UsageError as error:
        error.hint = Message(
            "use another {pp} or {vpp}, or set {decoder_first_pipeline_num_layers} and "
            "{decoder_last_pipeline_num_layers}"
        )
        raise


def _args(
    args: Mapping[str, Any],
    grid: Grid,
    stages: Stages,
    checkpoint: Checkpoint,
    layout: Layout,
    chosen: Mapping[str, Choice],
) -> dict[str, Any]:
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
    elif requested := layout.read(MegatronOptions).pipeline_model_parallel_layout:
        result["pipeline_model_parallel_layout"] = requested
    result["untie_embeddings_and_output_weights"] = OUTPUT in chosen
    if EMBEDDING in chosen:
        result["padded_vocab_size"] = chosen[EMBEDDING].tensor.shape[0]
    world_size = layout.world_size or checkpoint.world_size
    model_ranks = grid.tp * grid.pp * (args.get("context_parallel_size") or 1)
    if layout.world_size and layout.world_size % (grid.pp * grid.ranks_in_stage):
        raise UsageError(
            f"{pluralize(layout.world_size, 'rank')} do not divide into this layout",
            expected=f"a multiple of {grid.pp * grid.ranks_in_stage}",
            found=Message("{world_size}", world_size=layout.world_size),
            hint=Message("another {world_size}, {tp} or {pp}"),
        )
    if not world_size or world_size % model_ranks or world_size % (grid.pp * grid.ranks_in_stage):
        world_size = grid.pp * grid.ranks_in_stage
    result["world_size"] = world_size
    result["data_parallel_size"] = max(1, world_size // model_ranks)
    return result
