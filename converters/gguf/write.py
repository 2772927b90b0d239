"""Content of a written GGUF file: metadata, tensors' places, and slots for their elements."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.base.errors import UsageError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import Checkpoint, Key, Layout, Slot, Target, TargetFile
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Extent, Shape, whole
from ckpt.runs.model_files import run_files_left_out, training_left_out
from converters.gguf.facts import GgufFacts
from converters.gguf.header import aligned
from converters.gguf.metadata import ROPE_FACTORS, add_hyperparameters, rope_factors, rounding_notes
from converters.gguf.names import architecture
from converters.gguf.package import package
from converters.gguf.quantize import RULES, type_of, wanted_type
from converters.gguf.tokenizer import add_tokenizer, tokenizer_folder
from converters.gguf.types import F32, MXFP4, TYPE_BY_NAME, GgmlType

FILE = "model.gguf"
#: llama.cpp's file types by the type of most weights (`LlamaFileType`).
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32, "mxfp4": 38}


class _Planned(NamedTuple):
    """A tensor to write: name, type, and its shape in elements. `key` is None for content known already."""

    name: str
    type: GgmlType
    shape: Shape
    key: Key | None
    content: bytes = b""


def target(checkpoint: Checkpoint, layout: Layout) -> Target:
    """Return `model.gguf` for a checkpoint under llama.cpp's names."""
    arch = architecture(checkpoint.config, checkpoint.path)
    assert checkpoint.config is not None
    wanted, blocks = wanted_type(layout), checkpoint.facts_of(GgufFacts).blocks
    planned = [
        _planned(name, choice, blocks.get(name), wanted)
        for name, choice in sorted(choices(checkpoint, None).items(), key=lambda one: _order(one[0]))
    ]
    is_there = any(one.name == ROPE_FACTORS for one in planned)
    if arch == "llama" and not is_there and (factors := rope_factors(checkpoint.config)) is not None:
        content = struct.pack(f"<{len(factors)}f", *factors)
        planned.insert(0, _Planned(ROPE_FACTORS, F32, (len(factors),), None, content))
    header = _header(checkpoint, arch, planned)
    literals, slots, zeros, at = [(0, header)], [], [], len(header)
    for one in planned:
        dtype, shape = one.type.stored(one.shape)
        size = one.type.nbytes(one.shape)
        if one.key is None:
            literals.append((at, one.content))
        else:
            slots.append(Slot(one.key, whole(shape), Extent.contiguous(FILE, at, dtype, shape)))
        end = aligned(at + size)
        if end > at + size:
            zeros.append((at + size, end - at - size))
        at = end
    return Target(
        (TargetFile(FILE, at, tuple(literals), tuple(slots), tuple(zeros)),),
        dropped=(*training_left_out(checkpoint), *run_files_left_out(checkpoint)),
        notes=(*_notes(planned), *rounding_notes(checkpoint.config)),
        is_rearranged=bool(blocks),  # read back, they are values
        rule=RULES.get(layout.quantize or "", ""),
    )


def _planned(name: str, choice: Choice, block: str | None, wanted: GgmlType | None) -> _Planned:
    shape = choice.tensor.shape
    if block is None:
        return _Planned(name, type_of(name, shape, choice.dtype, wanted), shape, choice.key)
    kind = TYPE_BY_NAME[block]
    return _Planned(name, kind, (*shape[:-1], shape[-1] // kind.size * kind.block), choice.key)


def _order(name: str) -> tuple[int, int, str]:
    """Return a sort key: tensors of the whole model first, then layer by layer."""
    parts = name.split(".")
    return (1, int(parts[1]), name) if parts[0] == "blk" else (0, 0, name)


def _notes(planned: Sequence[_Planned]) -> list[str]:
    counts: dict[str, int] = {}
    for one in planned:
        counts[one.type.name] = counts.get(one.type.name, 0) + 1
    parts = [f"{pluralize(count, 'tensor')} in {name}" for name, count in sorted(counts.items())]
    return [f"wrote {', '.join(parts)}; llama.cpp keeps norms, biases and routers in f32"]


def _main_type(planned: Sequence[_Planned]) -> GgmlType:
    """Return the type with the most elements among weights of two or more dims. Experts decide if they are in MXFP4."""
    if any(one.type == MXFP4 for one in planned):
        return MXFP4
    counts: dict[GgmlType, int] = {}
    for one in planned:
        if len(one.shape) > 1:
            counts[one.type] = counts.get(one.type, 0) + prod(one.shape)
    return max(counts, key=lambda kind: counts[kind], default=F32)


def _header(checkpoint: Checkpoint, arch: str, planned: Sequence[_Planned]) -> bytes:
    gguf = package()
    config: Mapping[str, Any] = checkpoint.config or {}
    folder = tokenizer_folder(checkpoint.folders, checkpoint.path)
    writer = gguf.GGUFWriter(path=None, arch=arch)
    main = _main_type(planned)
    if main.name not in _FILE_TYPES:
        raise UsageError("llama.cpp has no file type for these weights", path=checkpoint.path, found=main.name)
    import numpy as np

    for one in planned:  # with a plain dtype, GGUFWriter takes the shape as it is
        kind = gguf.GGMLQuantizationType(one.type.number)
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), one.type.nbytes(one.shape), kind)
    metadata = gguf.Metadata.load(None, folder, None, sum(prod(one.shape) for one in planned))
    if metadata.size_label is None:
        total, shared, expert, count = writer.get_total_parameter_count()
        metadata.size_label = gguf.size_label(total, shared, expert, count)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)
    add_hyperparameters(writer, config, arch, checkpoint.path)
    writer.add_file_type(_FILE_TYPES[main.name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, folder, config, arch)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / FILE
        writer.write_header_to_file(path=file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        content = file.read_bytes()
    return content + b"\0" * (aligned(len(content)) - len(content))
