"""Quantization of plain weights during writing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ckpt.plan.namespace import config_parts
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Extent, Fragment, Pieces, Tensor
from ckpt.runs.model_files import QUANTIZATION_ENTRY, with_quantization
from converters.quantized._packed_weight import FusedWeights, PackedParts, PlainWeight
from converters.quantized._weight import StoredWeights
from converters.quantized.casts import RULE, SharedFactor, can_cast, cast_parts
from converters.quantized.methods import own_methods, quantizer_of
from converters.quantized.methods.compressed_tensors import SCALE
from converters.quantized.original import Original
from converters.quantized.parts import QuantizedWeights, quantized_weights
from converters.quantized.scheme import Quantizer

#: Attention and MLP weights in a decoder layer. All others stay plain: routers, embeddings, norms, the head, DeepSeek's
#: latent projections (`kv_a_proj_with_mqa`, `q_a_proj`), vision and audio towers.
_LINEAR = re.compile(
    r"(?:(?:model|language_model|text_model)\.)*layers\.(?P<layer>\d+)\."
    r"(?:self_attn|attention|mlp|feed_forward|block_sparse_moe)\.(?:(?:experts\.\d+|shared_experts?|shared_mlp)\.)?"
    r"(?P<module>[qkvo]_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|down_proj|gate_up_proj|w[123])\.weight"
)
#: Servers fuse these modules. They need one format, and one global scale.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_SOURCES = (BFLOAT16, FLOAT16, FLOAT32)
_NUMBER = re.compile(r"\d+")
_EXPERTS = re.compile(r"\.(experts|block_sparse_moe|moe|mlp|feed_forward|ffn)\.")
_KERNEL = 16  # a convolution's is smaller
_MAX_SHOWN = 12


def rule(checkpoint: Checkpoint, method: str) -> str:
    return RULE if can_cast(quantized_weights(checkpoint), method) else _quantizer(checkpoint, method).rule


def _quantizer(checkpoint: Checkpoint, method: str) -> Quantizer:
    return quantizer_of(method, str((checkpoint.config or {}).get("model_type")))


def quantized(checkpoint: Checkpoint, method: str, dtype: DType | None, like: Checkpoint | None = None) -> Checkpoint:
    """Replace plain linear weights by quantized ones, and record the method in the config.

    `checkpoint` has Hub names. The weights are rounded to `dtype` first (None: the model's own). `like` is a model to
    imitate. Raise UsageError for a quantized model, or without config or suitable weights, LossError if `like` has
    other tensors.
    """
    quantizer, stored = _quantizer(checkpoint, method), quantized_weights(checkpoint)
    if like is None and can_cast(stored, method):
        return _cast(checkpoint, method, quantizer, stored)
    _check_plain(checkpoint)
    original = None if like is None else Original.of(like, method, quantizer)
    chosen = {fqn: one for fqn, one in choices(checkpoint, dtype).items() if one.tensor.role != BUFFER}
    weights = {fqn: PlainWeight(fqn, one, checkpoint.computed, checkpoint.path) for fqn, one in chosen.items()}
    if original is None:
        taken = _with_fused(_suitable(checkpoint, weights, quantizer, method))
    else:
        taken = _with_fused(original.chosen(weights, checkpoint))
    gone = {(fqn, role) for fqn in taken for role in (WEIGHT, MASTER)}
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in gone}
    computed = dict(checkpoint.computed)
    for fqn in taken:
        for parts in (original or quantizer).pack(taken[fqn]):
            tensors |= _tensors(fqn, parts)
            computed |= {_block_path(fqn, parts, number): one.content for number, one in enumerate(parts.blocks)}
    plain = _plain_modules(checkpoint, chosen, taken)
    entry = quantizer.settings(plain) if original is None else original.entry
    found = replace(
        checkpoint,
        tensors=tensors,
        computed=computed,
        config={**(checkpoint.config or {}), QUANTIZATION_ENTRY: entry},
        notes=(*checkpoint.notes, *_notes(method, [chosen[fqn] for fqn in taken], plain)),
    )
    return found if original is None else original.added_to(found, chosen)


def _cast(checkpoint: Checkpoint, method: str, quantizer: Quantizer, weights: QuantizedWeights) -> Checkpoint:
    assert weights.quantization is not None
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)
    stored = StoredWeights(checkpoint, weights.tensors, FLOAT32)
    fused: dict[str, list[str]] = {}
    for owner, parts in weights.owners.items():
        fused.setdefault(_fused_name(owner), []).append(parts[SCALE])
    factors = {name: SharedFactor(stored, scales) for name, scales in fused.items()}
    for owner, parts in weights.owners.items():
        for packed in cast_parts(stored, parts, factors[_fused_name(owner)]):
            tensors |= _tensors(owner, packed)
            computed |= {_block_path(owner, packed, number): one.content for number, one in enumerate(packed.blocks)}
    chosen = {fqn: one for fqn, one in choices(checkpoint, None).items() if fqn not in weights.parts}
    recorded = weights.quantization.settings
    plain = sorted({*_plain_modules(checkpoint, chosen, ()), *recorded.get("ignore", ())})
    count = pluralize(len(weights.owners), "weight")
    entry = {QUANTIZATION_ENTRY: {**recorded, **quantizer.settings(plain)}}
    return replace(
        checkpoint,
        tensors=tensors,
        computed=computed,
        config=with_quantization(checkpoint.config or {}, entry),
        notes=(*checkpoint.notes, f"{count} cast from mxfp4 to {method} with unchanged values"),
    )


def _check_plain(checkpoint: Checkpoint) -> None:
    if checkpoint.config is None:
        raise UsageError(
            Message("{quantize} needs the model's config.json"),
            path=checkpoint.path,
            hint=Message("give it with {config=ORG/NAME}"),
        )
    found = quantized_weights(checkpoint)
    if found.quantization is None and not found.parts:
        return
    raise LossError(
        "this model is quantized already",
        path=checkpoint.path,
        expected="plain weights in bf16, fp16 or fp32",
        found=found.title,
        hint=Message("add {dequantize=True} to quantize its plain values again")
        if found.can_dequantize
        else "take the full-precision model from before quantization",
    )


def _suitable(
    checkpoint: Checkpoint, weights: Mapping[str, PlainWeight], quantizer: Quantizer, method: str
) -> dict[str, PlainWeight]:
    """Return the weights to quantize. Fused ones stay together.

    Raise UsageError if experts would stay plain.
    """
    parts = config_parts(checkpoint.config)
    num_layers = next((n for one in reversed(parts) if type(n := one.get("num_hidden_layers")) is int), None)
    groups: dict[str, list[str]] = {}
    for fqn in weights:
        match = (quantizer.names or _LINEAR).fullmatch(fqn)
        if match is not None and (num_layers is None or int(match["layer"]) < num_layers):
            groups.setdefault(_fused_name(fqn), []).append(fqn)
    found = {
        fqn: weights[fqn]
        for members in groups.values()
        if all(_has_whole_blocks(weights[one], quantizer) for one in members)
        for fqn in members
    }
    stacked = next((fqn for fqn in weights if fqn not in found and _is_stack(weights[fqn])), None)
    if stacked is not None:
        is_known = quantizer.names is not None and quantizer.names.fullmatch(stacked) is not None
        raise UsageError(
            Message("{quantize} can't quantize these experts, stacked in one tensor", quantize=method),
            path=checkpoint.path,
            fqn=stacked,
            expected="rows and columns in blocks of {} by {}".format(*quantizer.blocks)
            if is_known
            else "a tensor for each expert: transformers would not apply scales to stacked ones",
            found=list(weights[stacked].shape),
            hint=_other_method(checkpoint, method),
        )
    if not found:
        raise UsageError(
            Message("{quantize} finds no weight to quantize", quantize=method),
            path=checkpoint.path,
            expected="attention and MLP weights of decoder layers, in whole blocks of bf16, fp16 or fp32",
            found=f"model_type {(checkpoint.config or {}).get('model_type')}",
        )
    return found


def _with_fused(weights: Mapping[str, PlainWeight]) -> dict[str, PlainWeight]:
    groups: dict[str, list[PlainWeight]] = {}
    for fqn, weight in weights.items():
        groups.setdefault(_fused_name(fqn), []).append(weight)
    fused = {name: FusedWeights(members) for name, members in groups.items()}
    return {fqn: replace(weight, fused=fused[_fused_name(fqn)]) for fqn, weight in weights.items()}


def _is_stack(weight: PlainWeight) -> bool:
    found = len(weight.shape) > 2 and _EXPERTS.search(weight.fqn)
    return bool(found) and (".experts." in weight.fqn or min(weight.shape[1:]) >= _KERNEL)


def _other_method(checkpoint: Checkpoint, method: str) -> str | None:
    model_type = str((checkpoint.config or {}).get("model_type"))
    found = [name for name in own_methods(model_type) if name != method]
    return Message("{quantize} quantizes them", quantize=found[0]) if found else None


def _has_whole_blocks(weight: PlainWeight, quantizer: Quantizer) -> bool:
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (0, 0)
    is_divided = not rows % quantizer.blocks[0] and not columns % quantizer.blocks[1]
    return weight.choice.dtype in _SOURCES and bool(rows and columns) and is_divided


def _fused_name(fqn: str) -> str:
    """Return a name shared by fused weights."""
    module = fqn.removesuffix(".weight")
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{next((group[0] for group in _FUSED if leaf in group), leaf)}"


def _tensors(fqn: str, packed: PackedParts) -> dict[Key, Tensor]:
    """Return tensors. A block's content has the bytes of all."""
    module = fqn.rpartition(".")[0]
    fragments: list[list[Fragment]] = [[] for _ in packed.parts]
    for number, block in enumerate(packed.blocks):
        offset = 0
        for box, (dtype, _), found in zip(block.boxes, packed.parts.values(), fragments, strict=True):
            extent = Extent.contiguous(_block_path(fqn, packed, number), offset, dtype, box.sizes)
            found.append(Fragment(box, extent))
            offset += extent.nbytes
    result: dict[Key, Tensor] = {}
    for (template, (dtype, shape)), found in zip(packed.parts.items(), fragments, strict=True):
        name = template.format(w=fqn, m=f"{module}.")
        result[name, WEIGHT] = Tensor(name, WEIGHT, dtype, shape, Pieces(tuple(found)))
    return result


def _block_path(fqn: str, packed: PackedParts, number: int) -> str:
    return f"quantized:{next(iter(packed.parts)).format(w=fqn, m='')}:{number}"


def _plain_modules(checkpoint: Checkpoint, chosen: Mapping[str, Choice], taken: Iterable[str]) -> list[str]:
    """Return modules with plain matrices, also tied ones."""
    names = chosen.keys() - set(taken)
    matrices = {name for name in names if len(chosen[name].tensor.shape) >= 2}
    matrices |= {alias for alias, owner in checkpoint.ties.items() if owner in matrices or alias in matrices}
    matrices |= {owner for alias, owner in checkpoint.ties.items() if alias in matrices}
    return sorted({name.removesuffix(".weight") for name in matrices})


def _notes(method: str, taken: Sequence[Choice], plain: Sequence[str]) -> list[str]:
    counts = Counter(one.dtype.name for one in taken)
    notes = [f"{pluralize(count, 'weight')} quantized to {method} from {dtype}" for dtype, count in counts.items()]
    kinds = Counter(_NUMBER.sub("*", name) for name in plain)
    shown = [f"{name} ({count})" if count > 1 else name for name, count in list(kinds.items())[:_MAX_SHOWN]]
    more = [f"{len(kinds) - _MAX_SHOWN} more"] if len(kinds) > _MAX_SHOWN else []
    return [*notes, f"matrices kept plain: {', '.join([*shown, *more])}"] if plain else notes
