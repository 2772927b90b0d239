"""Relation between megatron-core's names and the Hub's. Each `model_type` has a table in `architectures`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.plan.checkpoint import (
    BUFFER,
    HUB,
    MEGATRON,
    MODEL_ROLES,
    WEIGHT,
    Checkpoint,
    Key,
    Layout,
    ParamGroup,
)
from ckpt.plan.namespace import config_parts
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, Tensor, whole
from ckpt.state.positions import megatron_schedule, sequences_seen
from converters.names.families.composites import COMPOSITES, Composite
from converters.names.families.config import Config
from converters.names.families.rows import DERIVED, Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron import architectures as tables
from converters.names.megatron.centered_norms import shifting_notes
from converters.names.megatron.config_against_args import refuse_another_models, under_older_names
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT
from converters.names.megatron.model.splits import (
    GROUPED,
    ROUTED_BLOCK,
    SHARED_BLOCK,
    SHARED_GROUPED,
    padded_vocab_size,
)
from converters.names.megatron.options import MegatronOptions
from converters.names.megatron.rows import EVERY
from converters.names.megatron.shapes_from_args import check_expected_shapes
from converters.names.megatron.table import Table
from converters.names.megatron.unsupported import MISSING
from converters.names.shifts import shifted
from converters.names.transformers.relation import relation as in_memory

#: Quantized weights and scales on the Hub.
_QUANTIZED = re.compile(r".*(_blocks|_scales|_scale_inv|\.weight_scale|\.qweight|\.qzeros|\.g_idx|\.absmax|\.SCB)")
#: Stacked experts, like in transformers 5's memory.
_STACKS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
#: Multi-token prediction, for tables without it.
_PREDICTING = re.compile(r"(^|\.)mtp")
#: Megatron's buffers.
BUFFERS = (".mlp.router.expert_bias",)
_VOCABULARY = (EMBEDDING, OUTPUT, "output_layer.bias")
#: In Megatron and on the Hub.
_OUTPUTS = (OUTPUT, "lm_head.weight")
#: Param group option for experts.
_EXPERTS = "is_expert_parallel"


@cache
def architectures() -> tuple[str, ...]:
    modules = {module.name for module in iter_modules(tables.__path__)}
    return tuple(sorted(name for name in (*FAMILIES, *COMPOSITES) if name.replace("-", "_") in modules))


def table_of(model_type: str) -> Table:
    return cast(Table, import_module(f"{tables.__name__}.{model_type.replace('-', '_')}").TABLE)


def to_megatron(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Convert names, and add Megatron-LM's arguments.

    Raise LossError for a tensor or property without a place in Megatron, CorruptError if a tensor contradicts the
    config.
    """
    table, sizes = table_of_checkpoint(checkpoint)
    args = table.args(sizes)
    checkpoint = _with_experts_apart(_with_prefix(checkpoint, table.prefix), sizes)
    checkpoint = _with_current_names(checkpoint, table, sizes)
    checkpoint, notes = _without_derived(checkpoint, (*DERIVED, *table.family.ignored))
    shapes = _shapes(checkpoint)
    _refuse_quantized(shapes)
    sizes, more = _with_stored_mtp(table, sizes, shapes)
    options = layout.read(MegatronOptions)
    multiple = options.make_vocab_size_divisible_by or args["make_vocab_size_divisible_by"]
    padded = padded_vocab_size(sizes.dims["v"], multiple, options.tp or 1)
    copies = {copy: owner for copy, owner in table.copies(sizes).items() if copy in shapes}
    relation = table.relation(sizes, padded, copies)
    check_complete(relation, shapes)
    plain, centred = translate(checkpoint, relation, MEGATRON), table.centred(sizes)
    named = shifted(plain, centred, -1)
    args |= {"make_vocab_size_divisible_by": multiple, "padded_vocab_size": padded}
    args |= {"mtp_num_layers": len(sizes.predicted) or None}
    position, seen = _data_position(named)
    return replace(
        named,
        tensors=_with_buffers(named.tensors),
        ties={OUTPUT: EMBEDDING} if sizes.tied else {},
        state=replace(named.state, **position, args={**args, **seen}),
        notes=(
            *checkpoint.notes,
            *notes,
            *more,
            *table.notes(sizes),
            *shifting_notes(plain, centred, -1),
            *_padding_notes(sizes.dims["v"], padded),
        ),
    )


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """Raise the same errors as `to_megatron`."""
    table, sizes = table_of_checkpoint(checkpoint)
    checkpoint = _with_names_of_tables(checkpoint, table)
    shapes = _shapes(checkpoint)
    has_mtp = any(name.startswith("mtp.") for name in shapes)
    centred = table.centred(sizes)
    if centred and under_older_names(checkpoint.state.args or {}).get("apply_layernorm_1p") is False:
        raise LossError(
            "the run's norms are not zero-centered, but this architecture requires it",
            path=checkpoint.path,
            expected="apply_layernorm_1p true",
            found="apply_layernorm_1p false",
        )
    notes = refuse_another_models(checkpoint, table, sizes)
    if sizes.predicted and not has_mtp:
        notes.append("the model has multi-token prediction layers, but this checkpoint doesn't have them")
        sizes = replace(sizes, predicted=())
    if has_mtp and not sizes.predicted:
        raise LossError(
            "the checkpoint has multi-token prediction layers, but the config declares no multi-token prediction",
            fqn=next(name for name in shapes if name.startswith("mtp.")),
            hint=Message("give a config.json with num_nextn_predict_layers to {config}") if table.prediction else None,
        )
    padded = shapes.get(EMBEDDING, (sizes.dims["v"],))[0]
    if padded < sizes.dims["v"]:
        raise CorruptError(
            "the embedding has fewer rows than the config's vocabulary",
            fqn=EMBEDDING,
            expected=f"at least {pluralize(sizes.dims['v'], 'row')}",
            found=f"{pluralize(padded, 'row')}",
            hint="does the config belong to this checkpoint?",
        )
    embedding, output = table.hub_name(EMBEDDING), table.hub_name(OUTPUT)
    copies = table.copies(sizes)
    copies.pop(output, None)
    relation = table.relation(sizes, padded, copies).inverse()
    check_complete(relation, shapes)
    named = translate(shifted(checkpoint, centred, 1), relation, HUB)
    notes += (*shifting_notes(checkpoint, centred, 1), *_block_notes(checkpoint))
    if padded > sizes.dims["v"]:
        rows = f"{padded - sizes.dims['v']} of {pluralize(padded, 'row')}"
        notes.append(Brief(f"the vocabulary's padding is left out: {rows} (unused)"))
    ties = {output: embedding, **table.second_names} if sizes.tied else {}
    state = replace(named.state, param_groups=tuple(map(_with_peak, _with_experts(named.state.param_groups))))
    if (sequences := sequences_seen(state)) is not None:
        state = replace(state, global_samples=sequences)
    return replace(named, ties=ties, state=state, notes=(*checkpoint.notes, *notes))


def _with_experts(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Join experts' groups with groups of equal options: DeepSpeed only loads its optimizer's own number of groups."""
    joined: list[ParamGroup] = []
    for group in groups:
        options = {name: value for name, value in group.options.items() if name != _EXPERTS}
        for number, known in enumerate(joined):
            if known.options == options:
                joined[number] = replace(known, fqns=(*known.fqns, *group.fqns))
                break
        else:
            joined.append(replace(group, options=options))
    return joined


def _with_peak(group: ParamGroup) -> ParamGroup:
    """Name the peak learning rate like torch's schedules."""
    if "max_lr" not in group.options or "initial_lr" in group.options:
        return group
    return replace(group, options={**group.options, "initial_lr": group.options["max_lr"]})


def _data_position(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schedule's position as a field, and the data's position as an argument."""
    sequences = sequences_seen(checkpoint.state)
    if sequences is None or not checkpoint.optimizer_states:
        return {}, {}
    return {"opt_param_scheduler": megatron_schedule(sequences)}, {"consumed_train_samples": sequences}


def repadded(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Pad the vocabulary like Megatron does for `layout`.

    Raise UsageError if the rows do not divide and the vocabulary's size is unknown.
    """
    args = checkpoint.state.args or {}
    old_tp = args.get("tensor_model_parallel_size") or 1
    shapes = _shapes(checkpoint)
    options = layout.read(MegatronOptions)
    requested, new_tp = options.make_vocab_size_divisible_by, options.tp or old_tp
    if (new_tp == old_tp and not requested) or EMBEDDING not in shapes:
        return checkpoint
    stored, multiple = shapes[EMBEDDING][0], args.get("make_vocab_size_divisible_by") or 128
    vocabulary = _vocabulary(checkpoint, args)
    if requested and vocabulary is None:
        raise UsageError(
            Message("{make_vocab_size_divisible_by} needs the vocabulary size, but it is unknown"),
            fqn=EMBEDDING,
            found=f"{pluralize(stored, 'row')}, padding included",
            hint=Message("give the model's config.json with {config}"),
        )
    if vocabulary is not None and (requested or padded_vocab_size(vocabulary, multiple, old_tp) == stored):
        padded = padded_vocab_size(vocabulary, requested or multiple, new_tp)
    else:
        padded = stored  # Padded by another rule, or a vocabulary of unknown size: keep it if it divides.
    if padded % new_tp:
        raise UsageError(
            "the vocabulary's rows do not divide among the tensor parallel ranks",
            fqn=EMBEDDING,
            expected=f"a multiple of {new_tp}",
            found=f"{pluralize(stored, 'row')}, vocabulary size {vocabulary or 'unknown'}",
            hint=None if vocabulary else Message("give the model's config.json with {config}"),
        )
    args = {**args, "padded_vocab_size": padded} | ({"make_vocab_size_divisible_by": requested} if requested else {})
    state = replace(checkpoint.state, args=args)
    if padded == stored:
        return replace(checkpoint, state=state)
    assert vocabulary is not None
    named = translate(checkpoint, _repadding(shapes, vocabulary, padded), MEGATRON)
    rows = pluralize(padded, "row")
    note = f"vocabulary size {vocabulary} is padded to {rows} instead of {stored}, for tp {new_tp}"
    if stored > vocabulary:
        note += f"; unused source rows {vocabulary}:{stored} are left out"
    return replace(named, state=replace(named.state, args=args), ties=checkpoint.ties, notes=(*checkpoint.notes, note))


def with_same_padding(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    shapes = _shapes(a), _shapes(b)
    sizes = [_vocabulary(checkpoint, checkpoint.state.args or {}) for checkpoint in (a, b)]
    vocabulary = next((size for size in sizes if size is not None), None)
    if vocabulary is None or all(shapes[0].get(name) == shapes[1].get(name) for name in _VOCABULARY):
        return a, b
    if any(known[name][0] < vocabulary for known in shapes for name in _VOCABULARY if name in known):
        return a, b
    first, second = (
        replace(translate(one, _repadding(known, vocabulary, vocabulary), MEGATRON), ties=one.ties)
        for one, known in zip((a, b), shapes, strict=True)
    )
    return first, second


def padding(checkpoint: Checkpoint) -> dict[str, Box]:
    """Return padding rows by fqn. Empty if the vocabulary's size is unknown."""
    vocabulary = _vocabulary(checkpoint, checkpoint.state.args or {})
    if vocabulary is None:
        return {}
    shapes = {name: shape for name, shape in _shapes(checkpoint).items() if name in _VOCABULARY}
    return {name: _rows_behind(vocabulary, shape) for name, shape in shapes.items() if shape and shape[0] > vocabulary}


def _rows_behind(vocabulary: int, shape: Shape) -> Box:
    return Box((vocabulary, *(0,) * (len(shape) - 1)), (shape[0] - vocabulary, *shape[1:]))


def _repadding(shapes: Mapping[str, Shape], vocabulary: int, padded: int) -> Relation:
    """Keep the first rows."""
    links, after = [], dict(shapes)
    before_padding: dict[str, tuple[Box, ...]] = {}
    after_padding: dict[str, tuple[Box, ...]] = {}
    for name, shape in shapes.items():
        if name not in _VOCABULARY:
            links.append(Link.rename(name, name, shape))
            continue
        kept, tail = Box((0,) * len(shape), (vocabulary, *shape[1:])), shape[1:]
        links.append(Link(name, kept, name, kept, tuple(range(len(shape)))))
        after[name] = (padded, *tail)
        for boxes, rows in ((before_padding, shape[0]), (after_padding, padded)):
            if rows > vocabulary:
                boxes[name] = (_rows_behind(vocabulary, (rows, *tail)),)
    return Relation(tuple(links), dict(shapes), after, before_padding, after_padding)


def _vocabulary(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int | None:
    config = checkpoint.config or {}
    config = config_parts(config)[-1] or config
    if config.get("vocab_size") is not None:
        return Config(config).size("vocab_size")
    recorded = args.get("vocab_size")
    return recorded if type(recorded) is int and recorded > 0 else None


def table_of_checkpoint(checkpoint: Checkpoint) -> tuple[Table, Sizes]:
    """Raise UsageError without a table."""
    assert checkpoint.config is not None
    model_type = checkpoint.config.get("model_type")
    if str(model_type) in MISSING:
        raise LossError(
            "megatron-core cannot compute this architecture",
            path=checkpoint.path,
            expected=f"an architecture without {MISSING[str(model_type)]}",
            found=f"model_type {model_type!r}",
        )
    if model_type not in architectures():
        raise UsageError(
            "there is no mapping between Megatron's names and the Hub's for this architecture",
            path=checkpoint.path,
            expected="one of " + ", ".join(architectures()),
            found=f"model_type {model_type!r}",
            hint="docs/new-architecture.md says how to add one",
        )
    table = table_of(model_type)
    config = checkpoint.config
    if isinstance(table.family, Composite) and table.family.ties(config) is None:
        has_output = any(fqn.endswith(_OUTPUTS) for fqn, _ in checkpoint.tensors)
        config = {**config, "tie_word_embeddings": not has_output}
    sizes = table.family.sizes(config)
    for stated in sizes.config.rope_contradictions():
        raise LossError(
            "the config has two different values for one setting",
            path=checkpoint.path,
            expected=f"one value for {' and '.join(stated)}",
            found=", ".join(f"{name} {value}" for name, value in stated.items()),
            hint=Message("remove the wrong one from a copy of config.json, and give the copy's folder with {config}"),
        )
    return table, sizes


def _shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Return shapes by fqn. States only count for names without a model tensor."""
    shapes: dict[str, Shape] = {}
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role in MODEL_ROLES or fqn not in shapes:
            shapes[fqn] = tensor.shape
    return shapes


def _with_prefix(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    if not prefix or any(fqn.startswith(prefix) for fqn, _ in checkpoint.tensors):
        return checkpoint
    shapes = _shapes(checkpoint)
    names = {name: name if name == "lm_head.weight" else prefix + name for name in shapes}
    return translate(checkpoint, Relation.renaming(names, shapes), checkpoint.namespace)


def _with_experts_apart(checkpoint: Checkpoint, sizes: Sizes) -> Checkpoint:
    """Split experts if a release stacks them like transformers in memory."""
    own = (name for layer in sizes.layers for name in layer)
    if any(map(_STACKS.search, own)) or not any(_STACKS.search(fqn) for fqn, _ in checkpoint.tensors):
        return checkpoint
    found = in_memory(checkpoint.config, _shapes(checkpoint))
    return checkpoint if found is None else translate(checkpoint, found, HUB)


def _with_current_names(checkpoint: Checkpoint, table: Table, sizes: Sizes) -> Checkpoint:
    """Use transformers' current names and dims of stacked experts."""
    family = table.family
    if not isinstance(family, Composite):
        return checkpoint
    shapes, stacks = _shapes(checkpoint), dict[str, Shape]()
    for number, held in enumerate(sizes.layers):
        stacks |= {family.prefix(number) + name: shape for name, shape in held.items() if len(shape) == 3}
    links: dict[str, Link] = {}
    squares, num_turned = [], 0
    for name, shape in shapes.items():
        current, turned = family.current(name), shape[:1] + shape[:0:-1]
        if current in links:
            raise LossError("two tensors would get the same name", fqn=name, found=links[current].a)
        is_turned = stacks.get(current, shape) == turned != shape
        links[current] = Link.rename(name, current, shape)
        if is_turned:
            links[current] = Link(name, whole(shape), current, whole(turned), (0, 2, 1))
        num_turned += is_turned
        squares += [name] if current in stacks and turned == shape else []
    if squares and num_turned:
        raise LossError(
            "the experts' matrices are stored [in, out], but this matrix is square, so its order is unknown",
            path=checkpoint.path,
            fqn=squares[0],
            hint="load and save the model with transformers 5: it stores all matrices [out, in]",
        )
    after = {current: link.b_box.sizes for current, link in links.items()}
    return translate(checkpoint, Relation(tuple(links.values()), shapes, after), checkpoint.namespace)


def _with_names_of_tables(checkpoint: Checkpoint, table: Table) -> Checkpoint:
    """Rename peers' modules.

    mcore-bridge puts them inside `visual`; mbridge calls transformers' `visual` `vision_model`.
    """
    shapes = _shapes(checkpoint)
    own = {row.hubs[0].split(".")[-2]: row.megatron.removesuffix(EVERY) for row in table.kept}
    modules = {f"visual.{module}.": name for module, name in own.items()}
    modules |= {"vision_model.": own["visual"]} if "visual" in own else {}
    names = {}
    for name in shapes:
        inside = next((inner for inner in modules if name.startswith(inner)), None)
        names[name] = modules[inside] + name.removeprefix(inside) if inside else name
    if all(name == own for own, name in names.items()):
        return checkpoint
    return translate(checkpoint, Relation.renaming(names, shapes), checkpoint.namespace)


def _without_derived(checkpoint: Checkpoint, patterns: Iterable[str]) -> tuple[Checkpoint, list[str]]:
    """Drop tensors that Megatron does not use or ckpt has no rows for, with a note per kind."""
    derived = [re.compile(pattern) for pattern in patterns]
    left = sorted({fqn for fqn, _ in checkpoint.tensors if any(pattern.fullmatch(fqn) for pattern in derived)})
    if not left:
        return checkpoint, []
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in set(left)}
    predicting = [fqn for fqn in left if _PREDICTING.search(fqn)]
    notes = []
    for names, what in (
        ([fqn for fqn in left if fqn not in predicting], "implied by the config"),
        (predicting, "for multi-token prediction (unsupported for this architecture)"),
    ):
        shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        notes += [f"{pluralize(len(names), 'tensor')} {what} are left out: {shown}"] if names else []
    return replace(checkpoint, tensors=tensors), notes


def _refuse_quantized(shapes: Mapping[str, Shape]) -> None:
    quantized = next((name for name in shapes if _QUANTIZED.fullmatch(name)), None)
    if quantized is not None:
        raise LossError(
            "Megatron has no place for quantized weights",
            fqn=quantized,
            expected="weights in bf16, fp16 or fp32",
            hint=Message("use {dequantize=True} for quantized weights"),
        )


def _with_stored_mtp(table: Table, sizes: Sizes, shapes: Mapping[str, Shape]) -> tuple[Sizes, list[str]]:
    """Drop layers that only the config has: transformers does not save them."""
    if not sizes.predicted:
        return sizes, []
    prefix = table.family.predicted_prefix(0, sizes.num_layers)
    if any(name.startswith(prefix) for name in shapes):
        return sizes, []
    note = "the model has multi-token prediction layers, but the files don't (transformers drops them)"
    return replace(sizes, predicted=()), [note]


def check_complete(relation: Relation, shapes: Mapping[str, Shape]) -> None:
    """Raise an error unless exactly the relation's tensors are present, with their shapes."""
    for name, shape in shapes.items():
        if name not in relation.a_shapes:
            raise LossError(
                "the architecture's table has no place for this tensor",
                fqn=name,
                found=f"shape {list(shape)}",
                hint="does the config belong to this checkpoint?",
            )
    check_expected_shapes(relation.a_shapes, shapes, "the config")


def _with_buffers(tensors: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
    found: dict[Key, Tensor] = {}
    for (fqn, role), tensor in tensors.items():
        role = BUFFER if role == WEIGHT and fqn.endswith(BUFFERS) else role
        found[fqn, role] = tensor._replace(role=role) if role != tensor.role else tensor
    return found


def _block_notes(checkpoint: Checkpoint) -> Iterator[str]:
    args, blocks = checkpoint.state.args or {}, checkpoint.facts_of(MegatronFacts).blocks
    sizes = ((ROUTED_BLOCK, blocks.routed, GROUPED), (SHARED_BLOCK, blocks.shared, SHARED_GROUPED))
    found = [(name, size, needed) for name, size, needed in sizes if size]
    if not found:
        return
    stated = ", ".join(f"{name} {size}" for name, size, _ in found)
    yield f"the experts' gate and up rows alternate in blocks ({stated}); written with all gate rows first"
    for name, _, needed in found:
        if args.get(needed) is False:
            what = f"megatron-core ignores {name} without {needed}"
            yield Note("{}: {accept_settings} leaves its rows unchanged", what, accept_settings=[name])


def _padding_notes(vocabulary: int, padded: int) -> list[str]:
    if padded == vocabulary:
        return []
    return [
        Brief(
            f"vocabulary size {vocabulary} is padded to {pluralize(padded, 'row')}: rows from {vocabulary} on are zero"
        )
    ]
