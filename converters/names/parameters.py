"""Parameters of a config's model, in memory or on a Megatron rank.

`in_memory` follows transformers 5, with all experts of a layer in one tensor; `megatron_stages` follows megatron-core.
A model type without a Megatron table is built by the installed transformers on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from ckpt.base.errors import UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.state.parameters import EMBEDDING, EXPERT, HEAD, LINEAR, OTHER, ROUTER, Block, Model, Parameter, Stage
from converters.names.families.composites import COMPOSITES
from converters.names.families.rows import Sizes
from converters.names.megatron import relation as megatron
from converters.names.megatron.model.axes import Grid, Stages
from converters.names.megatron.model.spelling import EMBEDDING as MEGATRON_EMBEDDING
from converters.names.megatron.model.spelling import OUTPUT, is_outside_language_model
from converters.names.megatron.model.splits import padded_vocab_size, rank_shape, split_of
from converters.names.megatron.rows import PADDED
from converters.names.megatron.table import RowPlace, Table
from converters.names.transformers import transformers_source

#: Megatron-LM's `--make-vocab-size-divisible-by`.
VOCAB_MULTIPLE = 128

#: Eager attention in transformers whose softmax uses the model's dtype.
_SCORES_IN_DTYPE = ("gpt2", "gpt_oss")
#: Models compared with autograd's saved tensors or peaks.
_MEASURED = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3")
)
#: Extra copies saved for the backward pass: attention's result, or queries, keys and values.
_SAVED_AGAIN = {"gpt2": 2, "gpt_neox": 1}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?)\.(\d+)\.")


def in_memory(config: Mapping[str, Any]) -> Model:
    """Return the model as transformers holds it in memory.

    Raise UsageError without a table or a class in the installed transformers.
    """
    model_type = config.get("model_type")
    if model_type not in megatron.architectures() or model_type in COMPOSITES:
        return _from_transformers(config)
    table, sizes = _table_of_config(config)
    return Model(
        str(model_type),
        tuple(_hub_parameters(table, sizes)),
        tuple(_blocks(str(model_type), table, sizes)) if model_type in _MEASURED else (),
        sizes.dims["h"],
        sizes.dims["v"],
    )


def megatron_stages(
    config: Mapping[str, Any], *, tp: int, pp: int, ep: int = 1, vocab_multiple: int = VOCAB_MULTIPLE
) -> tuple[Stage, ...]:
    """Return a tensor-parallel rank's parameters in each pipeline stage.

    Raise UsageError if heads or experts do not divide, if there are more stages than layers, embedding and loss, or
    without a table.
    """
    table, sizes = _table_of_config(config)
    heads, groups = sizes.dims["heads"], sizes.dims["groups"]
    grid = Grid(tp=tp, pp=pp, ep=ep, etp=tp if ep == 1 else 1)
    grid.check()
    if ep > 1 and not sizes.num_experts:
        raise UsageError("the model has no experts", found=Message("{ep}", ep=ep))
    if heads % tp or groups % tp:
        raise UsageError(
            "attention heads do not divide among tensor parallel ranks",
            expected=Message("a {tp} dividing {} in {}", pluralize(heads, "head"), pluralize(groups, "group")),
            found=Message("{tp}", tp=tp),
        )
    if sizes.num_experts % ep:
        what = f"{pluralize(sizes.num_experts, 'expert')} do not divide among {ep} expert parallel ranks"
        raise UsageError(what, hint=Message("another {ep}"))
    stages = _deal(sizes.num_layers, pp)
    padded = padded_vocab_size(sizes.dims["v"], vocab_multiple, tp)
    whole = list(_megatron_parameters(table, sizes, padded))
    return tuple(_stage(whole, stages.layers(number), number, sizes, grid) for number in range(pp))


def _deal(num_layers: int, pp: int) -> Stages:
    """Divide layers into nearly equal stages.

    Megatron-LM's options: `--account-for-{embedding,loss}-in-pipeline-split` (Megatron-DeepSpeed's
    `--pp-partition-method type:transformer|embedding`), then a smaller last stage
    (`--decoder-last-pipeline-num-layers`), then `--pipeline-model-parallel-layout`.
    """
    last = num_layers - (pp - 1) * -(-num_layers // pp)
    if not num_layers % pp:
        return Stages(num_layers, pp)
    if not (num_layers + 2) % pp:
        return Stages(num_layers, pp, embedding=True, loss=True)
    if last > 0:
        return Stages(num_layers, pp, last=last)
    size, rest = divmod(num_layers + 2, pp)
    if not size:
        raise UsageError(
            f"{pluralize(num_layers, 'layer')} are too few for {pluralize(pp, 'pipeline stage')}",
            expected=f"at most {num_layers + 2}: each has a layer, the embedding or the loss",
        )
    counts = [size + (0 < number <= rest) for number in range(pp)]
    items = ["embedding", *["decoder"] * num_layers, "loss"]
    starts = [sum(counts[:number]) for number in range(pp)]
    layout = tuple(tuple(items[start : start + count]) for start, count in zip(starts, counts, strict=True))
    return Stages(num_layers, pp, layout=layout)


def _stage(whole: list[Parameter], layers: range, number: int, sizes: Sizes, grid: Grid) -> Stage:
    first, last = number == 0, number == grid.pp - 1
    held = []
    for parameter in whole:
        if parameter.layer is not None:
            here = parameter.layer in layers
        elif parameter.name == MEGATRON_EMBEDDING:
            here = first or (last and sizes.tied)  # the last stage has a copy of a tied embedding
        else:
            here = (
                first if parameter.name.startswith("embedding.") or is_outside_language_model(parameter.name) else last
            )
        if here:
            held.append(_on_rank(parameter, grid))
    return Stage(tuple(held), layers, last)


def _on_rank(parameter: Parameter, grid: Grid) -> Parameter:
    split = split_of(parameter.name)  # with or without sections, a rank's part has the same size
    assert split is not None, parameter.name
    is_expert = parameter.kind == EXPERT
    shape = rank_shape(split, parameter.shape, grid.etp if is_expert else grid.tp)
    count = parameter.count // grid.ep if is_expert else parameter.count
    return replace(parameter, shape=shape, count=count)


def _table_of_config(config: Mapping[str, Any]) -> tuple[Table, Sizes]:
    model_type = config.get("model_type")
    if model_type not in megatron.architectures():
        raise UsageError(
            "Megatron's layout for this architecture is unknown",
            expected="one of " + ", ".join(megatron.architectures()),
            found=f"model_type {model_type!r}",
        )
    table = megatron.table_of(model_type)
    return table, replace(table.family.sizes(config), predicted=())


def _hub_parameters(table: Table, sizes: Sizes) -> Iterator[Parameter]:
    vocabulary = (sizes.dims["v"], sizes.dims["h"])
    yield Parameter(table.hub_name(MEGATRON_EMBEDDING), vocabulary, EMBEDDING)
    has_split_experts = _has_split_experts(table)
    places = _parameter_places(table, sizes)
    parameters = [parameter for place in places for parameter in _hub_tensors(place, sizes, has_split_experts)]
    # Approximates the registration order.
    yield from sorted(parameters, key=_registered)
    if not sizes.tied:
        yield Parameter(table.hub_name(OUTPUT), vocabulary, HEAD)


def _has_split_experts(table: Table) -> bool:
    return any("{e}" in hub for row in table.rows for hub in row.hubs)


def _registered(parameter: Parameter) -> tuple[float, bool]:
    """Return a sort key: positions first, then layers with their norms last, then the rest."""
    if parameter.kind == EMBEDDING:
        return -1, False
    layer = inf if parameter.layer is None else parameter.layer
    return layer, parameter.name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))


def _hub_tensors(place: RowPlace, sizes: Sizes, has_split_experts: bool) -> Iterator[Parameter]:
    layer, kind = place.layer, _kind_of_parameter(place.megatron, len(place.pattern.shape))
    if kind != EXPERT:
        for hub, shape in zip(place.hubs, place.shapes, strict=True):
            yield Parameter(hub, shape, kind, layer, adapter=_adapter(kind, hub, has_split_experts))
        return
    hub, shapes = place.hubs[0], place.pattern.hub_shapes
    rows = sum(shape[0] for shape in shapes)
    adapter = 0
    if "{e}" in hub:
        single = "up_proj" if hub.endswith(".up_proj.weight") else "down_proj"
        hub = hub.partition("{e}")[0] + ("gate_up_proj" if len(shapes) > 1 else single)
        adapter = len(shapes) * sizes.num_experts
    yield Parameter(hub, (sizes.num_experts, rows, *shapes[0][1:]), kind, layer, adapter=adapter)


#: Matrices that PEFT adapts by their own names in this case.
_ADAPTED = re.compile(r"\.(self_attn|linear_attn|shared_expert_gate)\.")


def _adapter(kind: str, hub: str, has_split_experts: bool) -> int:
    """Return the multiple of the rank for `target_modules="all-linear"`.

    PEFT 0.21 under transformers 5: if a model's files hold every expert separately, it adapts attention, routers and
    experts (with twice the rank if gate and up are one matrix), but no dense MLP.
    """
    if has_split_experts:
        return int(kind == ROUTER or (kind == LINEAR and _ADAPTED.search(hub) is not None))
    return int(kind == LINEAR)


def _megatron_parameters(table: Table, sizes: Sizes, padded: int) -> Iterator[Parameter]:
    vocabulary = (padded, sizes.dims["h"])
    yield Parameter(MEGATRON_EMBEDDING, vocabulary, EMBEDDING)
    for place in _parameter_places(table, sizes):
        name, shape = place.megatron.replace("{e}", "0"), place.pattern.shape
        kind = _kind_of_parameter(name, len(shape))
        yield Parameter(name, shape, kind, place.layer, sizes.num_experts if kind == EXPERT else 1)
    if not sizes.tied:
        yield Parameter(OUTPUT, vocabulary, HEAD)


def _parameter_places(table: Table, sizes: Sizes) -> Iterator[RowPlace]:
    for place in table.places(sizes):
        if place.row.kind != PADDED and not place.megatron.endswith(megatron.BUFFERS):
            yield place


def _kind_of_parameter(name: str, ndim: int) -> str:
    if ".local_experts." in name:
        return EXPERT
    if name.startswith("embedding."):
        return EMBEDDING
    if ndim != 2:
        return OTHER
    return ROUTER if ".router." in name else LINEAR


def _blocks(model_type: str, table: Table, sizes: Sizes) -> Iterator[Block]:
    """Yield sizes for activations."""
    config, dims, names = sizes.config, sizes.dims, {row.megatron for row in table.rows}
    fc1 = next((row for row in table.rows if row.megatron.endswith("}.mlp.linear_fc1.weight")), None)
    gated = fc1 is None or len(fc1.hubs) == 2
    activation = config.get("hidden_act") or config.get("activation_function") or "gelu_new"
    is_latent = "kd" in dims
    dense = Block(
        hidden=dims["h"],
        queries=dims["q"] if is_latent else dims["a"],
        keys=dims["q"] if is_latent else dims["k"],
        values=dims["a"] if is_latent else dims["k"],
        attended=dims["a"],
        heads=dims["heads"],
        latent=dims["qr"] + dims["kr"] if is_latent else 0,
        qk_norms=dims["heads"] + dims["groups"] if sizes.has("self_attn.q_norm.weight") else 0,
        layer_norm="decoder.final_layernorm.bias" in names,
        ffn=dims["f"],
        # Gate, its activation, up, their product. Else the activation's input and output, plus its parts if written in
        # Python.
        ffn_saved=4 if gated else 2 if activation == "gelu" else 5,
        gated=gated,
        again=_SAVED_AGAIN.get(model_type, 0),
        scores=2 if model_type == "gpt_oss" else 1,  # with its sinks, and without
        scores_fp32=model_type not in _SCORES_IN_DTYPE,
    )
    top = config.size("num_experts_per_tok", "num_experts_per_token", default=1) if sizes.num_experts else 0
    sparse = replace(
        dense,
        ffn=dims["s"] if any("shared_experts" in name for name in names) else 0,
        expert_ffn=dims.get("m", 0),
        expert_saved=4 if _has_split_experts(table) else 7,  # gpt-oss also clamps, scales and shifts
        num_experts=sizes.num_experts,
        top=top,
    )
    yield from (sparse if layer in sizes.sparse else dense for layer in range(sizes.num_layers))


def _from_transformers(config: Mapping[str, Any]) -> Model:
    model_type = config.get("model_type")
    if transformers_source.package() is None:
        raise UsageError(
            "this architecture's parameters are unknown without transformers",
            expected="one of " + ", ".join(megatron.architectures()) + ", or transformers installed",
            found=f"model_type {model_type!r}",
            hint="pip install 'ckpt-toolkit[transformers]'",
        )
    from converters.names.transformers.relation import build_model

    model = build_model(config, {})
    if model is None:
        raise UsageError("transformers has no model for this config", found=f"model_type {model_type!r}")
    kinds = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            kinds[f"{name}.weight"] = HEAD if module is head else LINEAR
        elif type(module).__name__ == "Embedding":
            kinds[f"{name}.weight"] = EMBEDDING
    parameters = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        kind = kinds.get(name, EXPERT if len(shape) == 3 and "expert" in name else OTHER)
        parameters.append(Parameter(name, shape, kind, layer_of(name), adapter=int(kind == LINEAR)))
    own = model.config.get_text_config()
    return Model(str(model_type), tuple(parameters), (), own.hidden_size, own.vocab_size)


def layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None
