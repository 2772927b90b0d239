"""What all formats of Megatron's models share: how a parallel GPTModel is cut, numbered and named.

Pure: no I/O.  Names are those of `ckpt.plan.checkpoint.MEGATRON`: megatron-core's own, with layers numbered over the
whole model, one tensor per expert under its number in the whole model, and norms under the names that Transformer
Engine's fused layers give them (`self_attention.linear_qkv.layer_norm_weight`), whichever layers the model was built
from.

* `Grid`: sizes of the parallel axes, and which ranks there are.
* `Stages`: which layers a pipeline rank's model chunks hold.
* `split_of`, `rank_boxes`: which part of a tensor a (expert) tensor parallel rank holds.
* `Spelling`: the names in one chunk of a model on one rank, and back.
* `in_order`: parameters in the order in which the modules register them, which is an optimizer's order.

Format facts: megatron-core 0.16.1 (transformer/transformer_block.py `get_num_layers_to_build`, transformer_layer.py
`get_transformer_layer_offset`, pipeline_parallel_layer_layout.py, tensor_parallel/layers.py, transformer/attention.py,
multi_latent_attention.py, mlp.py, moe/experts.py, moe/router.py, multi_token_prediction.py, models/gpt/gpt_model.py,
models/gpt/gpt_layer_specs.py), Megatron-LM of August 2026 (training/arguments.py, training/checkpointing.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptError, UsageError
from ckpt.plan.tensors import Box, Shape, whole

#: Names of a large model, of each of which every rank's file asks the same.
_NAMES = 1 << 17

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


# -- parallel axes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's coordinates.  `number` counts `Grid.ranks`, `in_stage` those of its pipeline stage."""

    tp: int
    pp: int
    ep: int
    etp: int
    in_stage: int
    number: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the parallel axes; `vpp` is the number of model chunks of a pipeline rank, `etp` the experts' `tp`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int = 1

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> Grid:
        """As Megatron-LM's arguments record it; CorruptError where one is no size."""
        tp = _size(args, "tensor_model_parallel_size", 1)
        return cls(
            tp=tp,
            pp=_size(args, "pipeline_model_parallel_size", 1),
            ep=_size(args, "expert_model_parallel_size", 1),
            vpp=_size(args, "virtual_pipeline_model_parallel_size", 1),
            etp=_size(args, "expert_tensor_parallel_size", tp),
        )

    @classmethod
    def recorded(cls, args: Mapping[str, Any], path: Path) -> Grid:
        """The grid of a checkpoint at `path`; CorruptError for one that Megatron has no ranks for."""
        grid = cls.of_args(args)
        try:
            grid.check()
        except UsageError as error:
            raise CorruptError(f"the recorded arguments: {error.what}", path=path, found=error.found) from None
        return grid

    @property
    def args(self) -> dict[str, Any]:
        """The grid as Megatron-LM's arguments."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_tensor_parallel_size": self.etp,
        }

    def check(self) -> None:
        """UsageError for a combination that Megatron has no ranks for."""
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(
                "a virtual pipeline needs a pipeline", expected="--pp above 1", found=f"--vpp {self.vpp} with --pp 1"
            )
        if self.tp % self.etp or self.ranks_in_stage % self.tp or self.ranks_in_stage % (self.etp * self.ep):
            raise UsageError(
                "expert and tensor parallel ranks do not fit each other",
                expected="an --etp that divides --tp, and one of tp and etp * ep that divides the other",
                found=f"tp {self.tp}, ep {self.ep}, etp {self.etp}",
            )

    @property
    def ranks_in_stage(self) -> int:
        """Ranks of one pipeline stage that among them hold each of its tensors, experts included."""
        return max(self.tp, self.etp * self.ep)

    def ranks(self) -> Iterator[Rank]:
        """One rank for each part of the model, by pipeline stage.

        Ranks of a stage are numbered tp first (parallel_state.py, order "tp-cp-ep-dp-pp"); the experts' grid counts
        the same ranks etp first, then ep.
        """
        for pp in range(self.pp):
            for number in range(self.ranks_in_stage):
                expert = number // self.etp % self.ep
                yield Rank(number % self.tp, pp, expert, number % self.etp, number, pp * self.ranks_in_stage + number)


def _size(args: Mapping[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise CorruptError(f"the argument {name} is no size", expected="a positive integer", found=repr(value))
    return value


def expert_range(rank: Rank, grid: Grid, num_experts: int) -> range:
    """The experts of a rank, by their numbers in the whole model."""
    if num_experts % grid.ep:
        raise UsageError(f"{num_experts} experts do not divide among {grid.ep} expert parallel ranks")
    count = num_experts // grid.ep
    return range(rank.ep * count, (rank.ep + 1) * count)


# -- pipeline stages -----------------------------------------------------------------------------------------

#: Elements of a written layout: embedding, decoder layer, multi-token prediction layer, loss.
_LAYER_TYPES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_MAX_LAYERS = 1 << 16

#: Arguments of Megatron-LM that deal layers to stages.  megatron-core's config spells the first two otherwise.
STAGE_ARGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


@dataclass(frozen=True, slots=True)
class Stages:
    """How `num_layers` decoder layers (and `num_mtp` layers behind them) are dealt to the chunks of pipeline ranks.

    `first` and `last` are numbers of layers of the first and the last rank where these differ from the others;
    `embedding` and `loss` count the embedding and the loss as layers; `layout` lists the elements of every chunk, of
    pp ranks first, then of chunks.
    """

    num_layers: int
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: tuple[tuple[str, ...], ...] | None = None
    num_mtp: int = 0

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> Stages:
        """As Megatron-LM's arguments record it; CorruptError where they contradict themselves."""
        grid = Grid.of_args(args)
        first = args.get("decoder_first_pipeline_num_layers", args.get("num_layers_in_first_pipeline_stage"))
        last = args.get("decoder_last_pipeline_num_layers", args.get("num_layers_in_last_pipeline_stage"))
        layout = args.get("pipeline_model_parallel_layout")
        stages = cls(
            _size(args, "num_layers", 0),
            grid.pp,
            grid.vpp,
            first,
            last,
            bool(args.get("account_for_embedding_in_pipeline_split")),
            bool(args.get("account_for_loss_in_pipeline_split")),
            parse_layout(layout) if layout else None,
            args.get("mtp_num_layers") or 0,
        )
        try:
            stages.check()
        except UsageError as error:
            raise CorruptError(
                f"the recorded arguments: {error.what}", expected=error.expected, found=error.found
            ) from None
        return stages

    def with_args(self, args: Mapping[str, Any]) -> Stages:
        """The same number of stages, dealt as those of `STAGE_ARGS` that are there say."""
        layout = args.get("pipeline_model_parallel_layout")
        return replace(
            self,
            first=args.get("decoder_first_pipeline_num_layers"),
            last=args.get("decoder_last_pipeline_num_layers"),
            embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
            loss=bool(args.get("account_for_loss_in_pipeline_split")),
            layout=parse_layout(layout) if layout else None,
        )

    def check(self) -> None:
        """UsageError where layers and stages do not fit each other."""
        chunks = [(p, v) for v in range(self.vpp) for p in range(self.pp)]
        if self.layout is not None and len(self.layout) != len(chunks):
            raise UsageError(
                "the pipeline layout has another number of stages", expected=len(chunks), found=len(self.layout)
            )
        reached, shares = 0, self._shares()
        for p, v in chunks:
            layers = self.layers(p, v)
            if layers.start != reached or len(layers) < 0:
                shares = None
            reached = layers.stop
        if shares is None or reached != self.num_layers:
            raise UsageError(
                f"{self.num_layers} layers cannot be dealt to {self.pp} pipeline stages of {self.vpp} chunks",
                expected="a number of layers (embedding and loss counted where asked) that divides evenly",
                found=self._as_asked(),
            )

    def _as_asked(self) -> str | None:
        """What of the division is not the even one, for a message."""
        counts = [f"{count} in the {which}" for which, count in (("first", self.first), ("last", self.last)) if count]
        others = [what for what in ("embedding", "loss") if getattr(self, what)]
        return ", ".join(counts + [f"the {what} counted" for what in others]) or None

    def _shares(self) -> bool | None:
        """None where a division leaves a rest."""
        if self.layout is not None or self.pp == 1:
            return True
        if self.first is not None or self.last is not None:
            uneven = [count for count in (self.first, self.last) if count is not None]
            rest, ranks = self.num_layers - sum(uneven), self.pp - len(uneven)
            whole_chunks = all(count % self.vpp == 0 for count in uneven)
            if not ranks and self.vpp > 1:
                return None  # megatron-core divides by the number of ranks between
            if rest < 0 or not whole_chunks or (rest % (ranks * self.vpp) if ranks else rest):
                return None
            return None if self.embedding or self.loss else True
        return None if (self.num_layers + self.embedding + self.loss) % (self.pp * self.vpp) else True

    def layers(self, pp: int, vp: int = 0) -> range:
        """The decoder layers of chunk `vp` of pipeline rank `pp`, by their numbers in the whole model."""
        if self.layout is not None:
            before = self.layout[: vp * self.pp + pp]
            start = sum(row.count("decoder") for row in before)
            return range(start, start + self.layout[vp * self.pp + pp].count("decoder"))
        if self.pp == 1:
            return range(self.num_layers)
        if self.first is not None or self.last is not None:
            return self._uneven(pp, vp)
        per_chunk = (self.num_layers + self.embedding + self.loss) // (self.pp * self.vpp)
        start = (vp * self.pp + pp) * per_chunk
        stop = start + per_chunk
        # Numbers count the embedding as layer 0, where it counts, and the loss as the last one.
        start, stop = max(0, start - self.embedding), stop - self.embedding
        return range(start, min(stop, self.num_layers))

    def _uneven(self, pp: int, vp: int) -> range:
        first, last = self.first or 0, self.last or 0
        ranks = self.pp - (self.first is not None) - (self.last is not None)
        middle = (self.num_layers - first - last) // ranks if ranks else 0
        counts = [middle] * self.pp
        if self.first is not None:
            counts[0] = first
        if self.last is not None:
            counts[-1] = last
        per_chunk = [count // self.vpp for count in counts]
        start = vp * sum(per_chunk) + sum(per_chunk[:pp])
        return range(start, start + per_chunk[pp])

    def is_first(self, pp: int, vp: int) -> bool:
        """Whether the chunk begins with the embedding."""
        return pp == vp == 0

    def is_last(self, pp: int, vp: int) -> bool:
        """Whether the chunk ends with the final norm's output layer."""
        return (pp, vp) == (self.pp - 1, self.vpp - 1)

    def has_mtp(self, pp: int, vp: int) -> bool:
        """Whether the layers of multi-token prediction are here; they need a copy of the embedding."""
        if self.layout is not None:
            return "mtp" in self.layout[vp * self.pp + pp]
        return self.num_mtp > 0 and self.is_last(pp, vp)

    def has_final_norm(self, pp: int, vp: int) -> bool:
        """Whether the decoder's last norm is here: at the end, or with MTP layers behind the last decoder layer."""
        return self.num_layers - 1 in self.layers(pp, vp) if self.num_mtp else self.is_last(pp, vp)

    def place(self, layer: int) -> tuple[int, int, int]:
        """(pipeline rank, chunk, number in the chunk) of a decoder layer."""
        for vp in range(self.vpp):
            for pp in range(self.pp):
                layers = self.layers(pp, vp)
                if layer in layers:
                    return pp, vp, layer - layers.start
        raise ValueError(f"layer {layer} of {self.num_layers}")


def parse_layout(layout: Any) -> tuple[tuple[str, ...], ...]:
    """`"Et*3|(tt|)*4m|L"`, or the list of stages that it stands for, as names of layer types per stage.

    megatron-core's grammar: `|` ends a stage, `x*n` and `(...)*n` repeat, commas are cosmetic.  A record of
    `PipelineParallelLayerLayout` has what it was made from as `input_data`.
    """
    data = getattr(layout, "attributes", {}).get("input_data") if not isinstance(layout, str | list | tuple) else layout
    if isinstance(data, list | tuple):
        return tuple(tuple(str(getattr(item, "value", item)).lower() for item in stage) for stage in data)
    if not isinstance(data, str):
        raise CorruptError("the pipeline layout is neither text nor a list", found=type(layout).__name__)
    text = data.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        length = sum(len(m[1]) * int(m[2][:9]) for m in re.finditer(pattern, text))
        if length > _MAX_LAYERS:
            raise UsageError("the pipeline layout is too long", expected=f"at most {_MAX_LAYERS} elements", found=data)
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    unknown = set(text) - set(_LAYER_TYPES) - {"|"}
    if unknown:
        raise UsageError("the pipeline layout has elements that are not known", expected="E, t, m, L", found=data)
    return tuple(tuple(_LAYER_TYPES[letter] for letter in stage) for stage in text.split("|"))


# -- tensor parallel parts -----------------------------------------------------------------------------------


class Split(Enum):
    """How tensor parallel ranks share a tensor: not at all, by rows, by rows of either half, or by columns."""

    WHOLE = "whole"
    ROWS = "rows"
    HALVES = "halves"
    COLUMNS = "columns"


_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)"
    r"|.*\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1|eh_proj)\.(weight|bias)"
    r"|.*\.core_attention\.softmax_offset"
)
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_DOWN = re.compile(r".*\.(linear_q_down_proj|linear_kv_down_proj)\.weight")
_WHOLE = re.compile(
    r".*\.(linear_proj|linear_fc2)\.bias|.*\.layer_norm_(weight|bias)|(.*\.)?\w*norm\.(weight|bias)"
    r"|.*\.router\.(weight|bias|expert_bias)|.*\.shared_experts\.gate_weight"
    r"|embedding\.(position|tokentype)_embeddings\.weight"
)
_EXPERT = re.compile(r"(?P<layer>.*)\.mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)")
_FIRST_LINEAR = re.compile(r"(.*\.)linear_fc1\.(weight|bias)")


def split_of(name: str, *, gated: bool, local_spec: bool = False) -> Split | None:
    """How `name` is shared; None for a name without a rule.

    `gated`: the MLP's first layer holds gate and up rows.  `local_spec`: the model is made of megatron-core's own
    layers, in which the down projections of latent attention are sharded.
    """
    if _ROWS.fullmatch(name):
        return Split.HALVES if gated and _FIRST_LINEAR.fullmatch(name) else Split.ROWS
    if _COLUMNS.fullmatch(name):
        return Split.COLUMNS
    if _DOWN.fullmatch(name):
        return Split.ROWS if local_spec else Split.WHOLE
    return Split.WHOLE if _WHOLE.fullmatch(name) else None


def second_linear(name: str) -> str | None:
    """For a first layer of an MLP (weight or bias) the weight of its second, which tells whether it is gated."""
    match = _FIRST_LINEAR.fullmatch(name)
    return f"{match[1]}linear_fc2.weight" if match else None


def is_gated(first: Shape, second: Shape) -> bool:
    """Whether an MLP has gate and up rows, from the shapes of its first layer and of its second layer's weight."""
    return first[0] == 2 * second[1]


def is_expert(name: str) -> bool:
    """Whether it is a tensor of a routed expert, which follows the experts' axes."""
    return _EXPERT.fullmatch(name) is not None


@lru_cache(_NAMES)
def expert_of(name: str) -> int | None:
    """The number of the routed expert that a tensor belongs to."""
    match = _EXPERT.fullmatch(name)
    return int(match["expert"]) if match else None


@lru_cache(8192)  # the same few shapes for thousands of experts
def rank_boxes(split: Split, shape: Shape, size: int, rank: int) -> tuple[Box, ...]:
    """The parts of a tensor of `shape` that rank `rank` of `size` holds, one behind the other along the first dim.

    UsageError where the tensor does not divide.
    """
    if split is Split.WHOLE or size == 1:
        return (whole(shape),)
    dim = 1 if split is Split.COLUMNS else 0
    parts = 2 if split is Split.HALVES else 1
    if len(shape) <= dim or shape[dim] % (parts * size):
        raise UsageError(
            f"a tensor of shape {list(shape)} does not divide among {size} tensor parallel ranks",
            expected=f"dim {dim} to be a multiple of {parts * size}",
        )
    length, each = shape[dim] // parts, shape[dim] // (parts * size)
    boxes = []
    for part in range(parts):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = part * length + rank * each, each
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return tuple(boxes)


@lru_cache(8192)
def rank_shape(split: Split, shape: Shape, size: int) -> Shape:
    """The shape of a rank's part of a tensor of `shape`."""
    boxes = rank_boxes(split, shape, size, 0)
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:]) if shape else shape


def full_shape(split: Split, shape: Shape, size: int) -> Shape:
    """The shape of the tensor of which each of `size` ranks has a part of `shape`."""
    if split is Split.WHOLE:
        return shape
    dim = 1 if split is Split.COLUMNS else 0
    return tuple(n * size if d == dim else n for d, n in enumerate(shape))


def padded_vocab_size(size: int, divisible_by: int, tp: int) -> int:
    """The rows of the embedding for a vocabulary of `size`: training/tokenizer, `_vocab_size_with_padding`."""
    multiple = divisible_by * tp
    return -(-size // multiple) * multiple


# -- names ---------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.*)")
_MTP = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<inner>transformer_layer|mtp_model_layer)\.(?P<rest>.*)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)")
_GROUPED = re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)")

#: The layer inside a layer of multi-token prediction, here and in megatron-core up to 0.16.
MTP_INNER = "transformer_layer"

#: What megatron-core's own layers call norms that are part of the next linear layer in Transformer Engine's.
_OWN_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What decides the names of a layer's norms: routed experts, and latent attention."""

    moe: bool
    latent: bool

    @classmethod
    def of(cls, names: Collection[str]) -> LayerKind:
        """From the names of a layer's tensors, in either spelling."""
        return cls(
            any("mlp.router." in name or "mlp.experts." in name for name in names),
            any("self_attention.linear_kv_up_proj." in name for name in names),
        )

    def fuses(self, norm: str) -> bool:
        """Whether Transformer Engine's layers hold this norm inside the next linear layer."""
        if norm == "pre_mlp_layernorm.":
            return not self.moe
        return self.latent != (norm == "input_layernorm.")


def layer_kinds(names: Iterable[str]) -> dict[str, LayerKind]:
    """The kind of every layer, by the prefix of its tensors."""
    members: dict[str, list[str]] = {}
    for name in names:
        prefix, rest = split_layer(name)
        if prefix:
            members.setdefault(prefix, []).append(rest)
    return {prefix: LayerKind.of(rest) for prefix, rest in members.items()}


@lru_cache(_NAMES)
def split_layer(name: str) -> tuple[str, str]:
    """`decoder.layers.3.`, or the layer inside an MTP layer, and the rest; `("", name)` for what is in no layer."""
    match = _LAYER.fullmatch(name) or _MTP.fullmatch(name)
    if match is None:
        return "", name
    return name[: match.start("rest")], match["rest"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one run spells names: `local_spec` for megatron-core's own layers, `grouped` for one module of all experts
    (`linear_fc1.weight0`), `mtp_inner` for the layer inside an MTP layer.
    """

    local_spec: bool = False
    grouped: bool = False
    mtp_inner: str = MTP_INNER

    @classmethod
    def of_names(cls, names: Collection[str]) -> Spelling:
        """The spelling that a rank's file is in."""
        kinds = layer_kinds(names)
        own = False
        for name in names:
            prefix, rest = split_layer(name)
            own = own or any(rest.startswith(norm) and kinds[prefix].fuses(norm) for norm, _ in _OWN_NORMS if prefix)
        inner = next((m["inner"] for name in names if (m := _MTP.fullmatch(name))), MTP_INNER)
        return cls(own, any(_GROUPED.fullmatch(split_layer(name)[1]) for name in names), inner)

    def canonical(self, name: str, kind: LayerKind | None, first_layer: int, first_expert: int) -> str:
        """The name in the whole model of what a chunk calls `name`; the chunk's layers begin with `first_layer`."""
        prefix, rest = split_layer(name)
        if not prefix or kind is None:
            return name
        if match := _LAYER.fullmatch(name):
            prefix = f"decoder.layers.{int(match['layer']) + first_layer}."
        else:
            prefix = prefix.replace(".mtp_model_layer.", f".{MTP_INNER}.")
        if match := _LOCAL_EXPERT.fullmatch(rest):
            rest = f"mlp.experts.local_experts.{int(match['expert']) + first_expert}.{match['rest']}"
        elif match := _GROUPED.fullmatch(rest):
            expert = int(match["expert"]) + first_expert
            rest = f"mlp.experts.local_experts.{expert}.{match['linear']}.{match['kind']}"
        for norm, fused in _OWN_NORMS:
            if rest.startswith(norm) and kind.fuses(norm):
                rest = fused + rest.removeprefix(norm)
        return prefix + rest

    def spelled(self, name: str, kind: LayerKind | None, first_layer: int, first_expert: int) -> str:
        """The inverse of `canonical`."""
        prefix, rest = split_layer(name)
        if not prefix or kind is None:
            return name
        if match := _LAYER.fullmatch(name):
            prefix = f"decoder.layers.{int(match['layer']) - first_layer}."
        else:
            prefix = prefix.replace(f".{MTP_INNER}.", f".{self.mtp_inner}.")
        if match := _LOCAL_EXPERT.fullmatch(rest):
            expert = int(match["expert"]) - first_expert
            linear, _, what = match["rest"].partition(".")
            rest = (
                f"mlp.experts.{linear}.{what}{expert}"
                if self.grouped
                else f"mlp.experts.local_experts.{expert}.{match['rest']}"
            )
        if self.local_spec:
            for norm, fused in _OWN_NORMS:
                if rest.startswith(fused) and kind.fuses(norm):
                    rest = norm + rest.removeprefix(fused)
        return prefix + rest


# -- order ---------------------------------------------------------------------------------------------------

_MODULES = (
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.tokentype_embeddings.",
    "decoder.layers.",
    "decoder.final_layernorm.",
    "mtp.layers.",
    "output_layer.",
)
_MTP_MODULES = ("enorm.", "hnorm.", "eh_proj.", "transformer_layer.", "mtp_model_layer.", "final_layernorm.")
_LAYER_MODULES = (
    "input_layernorm.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.",
    "mlp.",
)
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_NUMBERED = re.compile(r"(\D*)(\d*)")


def _position(name: str, prefixes: tuple[str, ...]) -> int:
    return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


@lru_cache(_NAMES)
def registered(name: str) -> tuple[Any, ...]:
    """A sort key that puts the names of one chunk, as the chunk spells them, into the order of its modules."""
    place: tuple[Any, ...] = (_position(name, _MODULES),)
    if match := re.fullmatch(r"(?:decoder|mtp)\.layers\.(\d+)\.(.*)", name):
        place += (int(match[1]),)
        rest = match[2]
        if name.startswith("mtp."):
            place += (_position(rest, _MTP_MODULES),)
            rest = re.sub(r"^(transformer_layer|mtp_model_layer)\.", "", rest)
        place += (_position(rest, _LAYER_MODULES),)
        if match := _LOCAL_EXPERT.fullmatch(rest):
            place += (int(match["expert"]),)
            rest = match["rest"]
        elif match := _GROUPED.fullmatch(rest):  # Transformer Engine's GroupedLinear: weight0, bias0, weight1, ...
            return (*place, match["linear"], int(match["expert"]), _position(match["kind"], _PARAMETERS))
        name = rest
    module, _, parameter = name.rpartition(".")
    numbered = _NUMBERED.match(parameter)
    assert numbered is not None
    return (*place, module, _position(numbered[1], _PARAMETERS), int(numbered[2] or 0), parameter)


def in_order(names: Iterable[str]) -> list[str]:
    """The names of one chunk, as the chunk spells them, in the order in which megatron-core 0.16 registers them."""
    return sorted(names, key=registered)
