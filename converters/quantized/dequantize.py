"""Plain weights in place of quantized ones, computed block by block during writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.move.finite import finite_content
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.planner import first_index
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Tensor
from ckpt.runs.model_files import QUANTIZATION_ENTRY, with_quantization
from converters.quantized._weight import StoredWeights, Weight, WeightBlock, model_dtype
from converters.quantized.parts import QuantizedWeights, quantized_weights

_PACKED = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "float8_e8m0fnu")
_PACKED_DTYPES = frozenset(BY_NAME[name] for name in _PACKED)


def dequantized(checkpoint: Checkpoint, dtype: DType | None) -> Checkpoint:
    """Replace quantized weights by plain weights, and remove the config's record.

    `dtype` None uses the model config's. Raise UsageError for unsupported methods, CorruptError if a weight is
    incomplete. Reading raises LossError for a number too large for float16, CorruptError for NaN or infinity.
    """
    tensors = {fqn: tensor for (fqn, role), tensor in checkpoint.tensors.items() if role in (WEIGHT, BUFFER)}
    stored = StoredWeights(checkpoint, tensors, dtype or model_dtype(checkpoint.config))
    quantized = quantized_weights(checkpoint)
    check_parts_known(checkpoint, quantized)
    weights = [plain_weight(stored, quantized, owner) for owner in quantized.owners]
    used = {part for weight in weights for part in weight.parts}
    unused = (quantized.parts | quantized.attention_scales) - used
    gone = used | unused
    kept = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in gone}
    _check_plain(checkpoint, kept)
    computed = dict(checkpoint.computed)
    plain: dict[Key, Tensor] = {}
    for weight in weights:
        plain[weight.fqn, WEIGHT] = _tensor(weight)
        for number, block in enumerate(weight.blocks):
            index = partial(_index_in_weight, weight, block)
            how = (block.content, weight.dtype, index, checkpoint.path, weight.fqn)
            computed[_path(weight, number)] = partial(finite_content, *how)
    return replace(
        checkpoint,
        tensors={**kept, **plain},
        computed=computed,
        config=checkpoint.config and {**with_quantization(checkpoint.config, {}), QUANTIZATION_ENTRY: {}},
        notes=(*checkpoint.notes, *_dequantized_notes(weights, sorted(unused), bool(checkpoint.blocks))),
    )


def can_dequantize(checkpoint: Checkpoint) -> bool:
    return quantized_weights(checkpoint).can_dequantize


def check_parts_known(checkpoint: Checkpoint, quantized: QuantizedWeights) -> None:
    """Raise UsageError for an unknown method, CorruptError for faults."""
    if quantized.quantization is not None and not quantized.can_dequantize:
        raise UsageError(
            "ckpt cannot dequantize this quantization method",
            path=checkpoint.path,
            found="; ".join([f"{quantized.title}, recorded in {quantized.quantization.file}", *quantized.unsupported]),
            hint="take the full-precision model from before quantization",
        )
    if faults := quantized.faults:
        more = f"; and {len(faults) - 1} more" if faults[1:] else ""
        raise CorruptError(
            "quantized weights are not complete, so their values are unknown",
            path=checkpoint.path,
            fqn=faults[0].fqn,
            expected="every quantized weight with exactly the parts of its method",
            found=f"{faults[0]}{more}",
            hint="`ckpt check` lists all faults; download or copy the folder again",
        )


def plain_weight(stored: StoredWeights, quantized: QuantizedWeights, owner: str) -> Weight:
    """Return the plain weight. Raise UsageError if its values are unknown, or a part changes them in unknown ways."""
    parts, schemes = quantized.owners[owner], quantized.schemes[owner]
    dequantize, *others = {scheme.dequantize for scheme in schemes}
    if dequantize is None or others:
        found = f"{quantized.title}, with {', '.join(sorted(parts.values()))}"
        raise stored.unsupported(owner, found=found)
    weight = dequantize(stored, owner, parts)
    for template, part in parts.items():
        if part not in weight.parts and not all(scheme.parts[template].is_for_activations for scheme in schemes):
            raise stored.unsupported(
                part, found=f"a part of {quantized.title} whose effect on the values is not proved"
            )
    return weight


def _check_plain(checkpoint: Checkpoint, tensors: Mapping[Key, Tensor]) -> None:
    parts = quantized_weights(replace(checkpoint, tensors=tensors)).parts
    for (fqn, role), tensor in tensors.items():
        if role == WEIGHT and (tensor.dtype in _PACKED_DTYPES or fqn in parts):
            raise LossError(
                "this tensor would stay quantized: its weight is unknown",
                path=checkpoint.path,
                fqn=fqn,
                expected="a part of a quantized weight",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )


def _tensor(weight: Weight) -> Tensor:
    pieces = tuple(_fragment(weight, number, block) for number, block in enumerate(weight.blocks))
    return Tensor(weight.fqn, WEIGHT, weight.dtype, weight.shape, Pieces(pieces))


def _fragment(weight: Weight, number: int, block: WeightBlock) -> Fragment:
    sizes = block.region.sizes if isinstance(block.region, Box) else (block.region.numel,)
    extent = Extent.contiguous(_path(weight, number), 0, weight.dtype, sizes)
    return Fragment(block.region, extent._replace(strides=(1, sizes[0])) if block.transposed else extent)


def _index_in_weight(weight: Weight, block: WeightBlock, number: int) -> tuple[int, ...]:
    if not isinstance(block.region, Box) or not block.transposed:
        return first_index(block.region, weight.shape, number)
    inner = np.unravel_index(number, block.region.sizes, order="F")
    return tuple(offset + int(i) for offset, i in zip(block.region.offsets, inner, strict=True))


def _path(weight: Weight, number: int) -> str:
    return f"dequantized:{weight.fqn}:{number}"


def _dequantized_notes(weights: Sequence[Weight], unused: Sequence[str], has_blocks: bool) -> list[str]:
    counts = Counter((weight.method, weight.dtype.name) for weight in weights)
    notes = [f"{pluralize(count, 'weight')} dequantized from {of} to {dtype}" for (of, dtype), count in counts.items()]
    if unused:
        notes.append(f"left out: {pluralize(len(unused), 'scale')} for activations, for example {unused[0]}")
    return notes if notes or has_blocks else ["dequantized nothing: no weight is quantized"]
