"""Plain weights in place of quantized ones, computed block by block during writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Tensor
from ckpt.runs.quantization import quantization_of
from converters.names.quantization.parts import quantized_weights
from converters.quantized import bitsandbytes, fp8, mxfp4
from converters.quantized._weight import StoredWeights, Weight, WeightBlock, model_dtype

#: Finders by the config's `quant_method`.
_METHODS: Mapping[str, Callable[[StoredWeights], Iterator[Weight]]] = {
    mxfp4.METHOD: mxfp4.find,
    bitsandbytes.METHOD: bitsandbytes.find,
    fp8.METHOD: fp8.find,
}
#: Dtypes for packed parts.
_PACKED = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "float8_e8m0fnu")
_PACKED_DTYPES = frozenset(BY_NAME[name] for name in _PACKED)


def dequantized(checkpoint: Checkpoint, dtype: DType | None) -> Checkpoint:
    """Replace quantized weights in `checkpoint` by plain weights, and remove `quantization_config`.

    `dtype` is the target dtype; None uses the model config's dtype. Raise UsageError for unsupported methods,
    CorruptError if a weight is incomplete.
    """
    config = checkpoint.config or {}
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    tensors = {fqn: tensor for (fqn, role), tensor in checkpoint.tensors.items() if role in (WEIGHT, BUFFER)}
    stored = StoredWeights(checkpoint, tensors, quantization, dtype or model_dtype(config))
    weights = [weight for find in _finders(checkpoint) for weight in find(stored)]
    unused = sorted({*quantized_weights(checkpoint).attention_scales, *(n for one in weights for n in one.unused)})
    gone = {*unused, *(part for weight in weights for part in weight.parts)}
    kept = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in gone}
    _check_plain(checkpoint, kept)
    computed = dict(checkpoint.computed)
    plain: dict[Key, Tensor] = {}
    for weight in weights:
        plain[weight.fqn, WEIGHT] = _tensor(weight)
        computed |= {_path(weight, number): block.content for number, block in enumerate(weight.blocks)}
    return replace(
        checkpoint,
        tensors={**kept, **plain},
        computed=computed,
        config=checkpoint.config and {name: value for name, value in config.items() if name != "quantization_config"},
        notes=(*checkpoint.notes, *_dequantized_notes(weights, unused)),
    )


def can_dequantize(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint's quantization method is supported or unrecorded."""
    quantization = quantization_of(checkpoint.config, checkpoint.folders)
    return quantization is None or quantization.method in (None, *_METHODS)


def _finders(checkpoint: Checkpoint) -> Iterable[Callable[[StoredWeights], Iterator[Weight]]]:
    quantization = quantization_of(checkpoint.config, checkpoint.folders)
    if quantization is None or quantization.method is None:
        return _METHODS.values()
    if quantization.method not in _METHODS:
        raise UsageError(
            "ckpt cannot dequantize this quantization method",
            path=checkpoint.path,
            expected=" or ".join(_METHODS),
            found=f"quant_method {quantization.method!r}, recorded in {quantization.file}",
            hint="take the full-precision model from before quantization",
        )
    return [_METHODS[quantization.method]]


def _check_plain(checkpoint: Checkpoint, tensors: Mapping[Key, Tensor]) -> None:
    parts = quantized_weights(replace(checkpoint, tensors=tensors)).parts
    for (fqn, role), tensor in tensors.items():
        if role == WEIGHT and (tensor.dtype in _PACKED_DTYPES or fqn in parts):
            raise LossError(
                "this tensor would stay quantized: its weight is unknown",
                path=checkpoint.path,
                fqn=fqn,
                expected="the weight parts in " + ", ".join(_METHODS),
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )


def _tensor(weight: Weight) -> Tensor:
    pieces = tuple(_fragment(weight, number, block) for number, block in enumerate(weight.blocks))
    return Tensor(weight.fqn, WEIGHT, weight.dtype, weight.shape, Pieces(pieces))


def _fragment(weight: Weight, number: int, block: WeightBlock) -> Fragment:
    sizes = block.region.sizes if isinstance(block.region, Box) else (block.region.numel,)
    extent = Extent.contiguous(_path(weight, number), 0, weight.dtype, sizes)
    return Fragment(block.region, extent._replace(strides=(1, sizes[0])) if block.transposed else extent)


def _path(weight: Weight, number: int) -> str:
    return f"dequantized:{weight.fqn}:{number}"


def _dequantized_notes(weights: list[Weight], unused: list[str]) -> list[str]:
    counts = Counter((weight.method, weight.dtype.name) for weight in weights)
    notes = [f"{pluralize(count, 'weight')} dequantized from {of} to {dtype}" for (of, dtype), count in counts.items()]
    if unused:
        notes.append(f"left out: {pluralize(len(unused), 'scale')} for activations, for example {unused[0]}")
    return notes or ["nothing is quantized here, so nothing is dequantized"]
