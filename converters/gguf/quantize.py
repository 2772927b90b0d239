"""Types of written tensors, and tensors quantized in blocks, computed on writing.

Types are chosen like in llama.cpp's converter (`conversion/base.py`, `prepare_tensors`). The arithmetic is done by the
`gguf` package (`gguf/quants.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.words import Message
from ckpt.plan.checkpoint import MODEL_ROLES, WEIGHT, Checkpoint, Layout
from ckpt.plan.dtypes import BFLOAT16, DType
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Shape, Tensor
from converters.gguf.blocks import CHUNKS, whole_rows
from converters.gguf.facts import GgufFacts
from converters.gguf.types import F16, F32, MXFP4, PLAIN, Q8_0, TYPE_BY_NAME, GgmlType

#: Numbers read at once. With fewer, threads wait for the interpreter's lock.
_STEP = 1 << 19
#: Largest float16 number.
_MAX_SCALE = 65504
_IS_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
_NEAREST = "each number is rounded to the nearest, ties to even"
#: Rounding of each type that can be asked for.
RULES = {
    **dict.fromkeys(("f32", "f16", "bf16"), _NEAREST),
    "q8_0": "llama.cpp quantize_row_q8_0_ref: the scale is the maximum / 127, rounded to float16 after the numbers are "
    "divided by it; ties away from zero",
    "mxfp4": "llama.cpp quantize_row_mxfp4_ref: the scale is the maximum's power of two / 4, numbers above 6 are "
    "clipped; ties toward zero",
}
#: llama.cpp computes with these in float32.
_ALWAYS_F32 = re.compile(r".*_norm\.weight|.*\.ffn_gate_inp\.weight|.*(?<!\.weight)")


def wanted_type(layout: Layout) -> GgmlType | None:
    """Return the requested type of the weights, or None for their own."""
    asked = layout.quantize
    if asked is None:
        return None if layout.dtype is None else PLAIN[layout.dtype]
    if layout.dtype is not None and PLAIN[layout.dtype].name != asked:
        raise UsageError(
            Message("{quantize} and {dtype} give two types"),
            found=Message("{quantize} {dtype}", quantize=asked, dtype=PLAIN[layout.dtype].name),
        )
    return TYPE_BY_NAME[asked]


def type_of(name: str, shape: Shape, dtype: DType, wanted: GgmlType | None) -> GgmlType:
    """Return the type that llama.cpp's converter gives to a tensor."""
    if len(shape) < 2 or _ALWAYS_F32.fullmatch(name):
        return F32
    if wanted == MXFP4 and not _IS_EXPERTS.fullmatch(name):
        wanted = None
    if wanted is None:
        if dtype not in PLAIN:
            raise LossError(
                "GGUF has no type for these weights", fqn=name, found=dtype, hint=Message("{dtype=bf16} casts them")
            )
        return PLAIN[dtype]
    return F16 if shape[-1] % wanted.block else wanted


def quantized(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return `checkpoint` with the tensors that the layout quantizes as bytes of blocks."""
    wanted = wanted_type(layout)
    if wanted is None or wanted.dtype is not None:
        return checkpoint
    tensors, computed = dict(checkpoint.tensors), dict(checkpoint.computed)
    blocks = dict(checkpoint.facts_of(GgufFacts).blocks)
    for name, choice in choices(checkpoint, None).items():
        if name in blocks or type_of(name, choice.tensor.shape, choice.dtype, wanted) != wanted:
            continue
        for role in MODEL_ROLES:
            tensors.pop((name, role), None)
        tensors[name, WEIGHT] = _in_blocks(name, choice, wanted, checkpoint, computed)
        blocks[name] = wanted.name
    if not blocks:
        raise UsageError(
            Message("this model has no tensors for {quantize}", quantize=wanted.name),
            path=checkpoint.path,
            expected="a model with experts" if wanted == MXFP4 else f"rows that divide into {wanted.block}",
        )
    return replace(checkpoint, tensors=tensors, computed=computed, facts=GgufFacts(blocks=blocks))


def _in_blocks(name: str, choice: Choice, kind: GgmlType, checkpoint: Checkpoint, computed: dict[str, Any]) -> Tensor:
    dtype, shape = kind.stored(choice.tensor.shape)
    pieces, done = [], 0
    for number, box in enumerate(whole_rows(choice.tensor.shape, CHUNKS[kind])):
        path = f"{kind.name}:{name}:{number}"
        computed[path] = partial(_quantized_rows, choice, box, kind, checkpoint.path, checkpoint.computed)
        size = box.numel // kind.block * kind.size
        pieces.append(Fragment(FlatRange(done, done + size), Extent.contiguous(path, 0, dtype, (size,))))
        done += size
    assert done == prod(shape)
    return Tensor(name, WEIGHT, dtype, shape, Pieces(tuple(pieces)))


def _quantized_rows(choice: Choice, box: Box, kind: GgmlType, path: str, sources: Mapping[str, Any]) -> memoryview:
    import numpy as np

    from ckpt.move.files import OpenFiles
    from ckpt.move.finite import chosen_bits, finite_values
    from converters.gguf.package import quants
    from converters.gguf.q8_0 import q8_0_blocks

    tensor = choice.tensor
    if kind == Q8_0 and choice.dtype == BFLOAT16:
        with OpenFiles() as opened:
            boxes = map(box.inside, whole_rows(box.sizes, _STEP))
            parts = (chosen_bits(choice, one, sources, opened) for one in boxes)
            found = q8_0_blocks(parts, box.numel // kind.block)
        if found is not None:
            return found.data.cast("B")
    values = finite_values(choice, box, sources, path).reshape(-1, tensor.shape[-1])
    if kind == Q8_0 and np.abs(values).max(initial=0) > 127 * _MAX_SCALE:
        why = "a weight is too large for q8_0, whose scales are float16"
        raise LossError(why, path=path, fqn=tensor.fqn, found=f"in {box}")
    content: memoryview = np.ascontiguousarray(quants(kind.number)(values)).data.cast("B")
    return content
