"""Comparison of a conversion's output with its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ckpt.base.text import pluralize
from ckpt.compare.compare import narrower
from ckpt.compare.pairs import EQUAL, ONLY_B, Report
from ckpt.move.casts import cast_bits
from ckpt.move.files import translate_os_errors
from ckpt.move.reading import Computed, read_box
from ckpt.move.source import open_stream
from ckpt.plan.checkpoint import Checkpoint, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.planner import Plan
from ckpt.plan.tensors import Extent, Tensor, Whole, whole


def as_written(plan: Plan, *, every_cast: bool = False) -> Checkpoint:
    """Return the plan's checkpoint, with casts between bf16 and fp16 already applied.

    No rounding makes the two comparable. With `every_cast`, casts between all dtypes are applied.
    """
    source = plan.checkpoint
    tensors, computed = dict(source.tensors), dict(source.computed)
    for slot in (slot for file in plan.target.files for slot in file.slots):
        tensor, dtype = source.tensors[slot.key], slot.extent.dtype
        if narrower(tensor.dtype, dtype) is None or (every_cast and tensor.dtype != dtype):
            path = f"cast:{tensor.role}:{tensor.fqn}"
            computed[path] = partial(_cast, tensor, dtype, source.computed)
            stored = Whole(Extent.contiguous(path, 0, dtype, tensor.shape))
            tensors[slot.key] = tensor._replace(dtype=dtype, source=stored, replicas=())
    return replace(source, tensors=tensors, computed=computed)


def _cast(tensor: Tensor, dtype: DType, computed: Computed) -> memoryview:
    bits = cast_bits(read_box(tensor, whole(tensor.shape), computed).reshape(-1), tensor.dtype, dtype)
    return bits.data.cast("B")


_BLOCK = 1 << 20


def changed_files(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield a sentence for each file with a wrong size, or wrong bytes outside its tensors."""
    for file in plan.target.files:
        path = folder / file.name
        with translate_os_errors(path):
            if not path.is_file():
                yield f"{file.name} is missing"
            elif path.stat().st_size != file.size:
                yield f"{file.name} has {pluralize(path.stat().st_size, 'byte')} instead of {file.size}"
            elif (at := _first_change(file, path)) is not None:
                yield f"{file.name} has other bytes at {at}"
            elif file.copied is not None and not _is_copy(path, file.copied.path):
                yield f"{file.name} has other bytes than {file.copied.path}"


def _first_change(file: TargetFile, path: Path) -> int | None:
    with open(path, "rb") as opened:
        for offset, expected in _planned_bytes(file):
            opened.seek(offset)
            if opened.read(len(expected)) != expected:
                return offset
    return None


def _planned_bytes(file: TargetFile) -> Iterator[tuple[int, bytes]]:
    yield from file.literals
    for offset, length in file.zeros:
        for at in range(offset, offset + length, _BLOCK):
            yield at, bytes(min(_BLOCK, offset + length - at))


def is_equal(view: BinaryIO, path: Path) -> bool:
    with translate_os_errors(path), open(path, "rb") as file:
        while (block := view.read(_BLOCK)) == file.read(_BLOCK):
            if not block:
                return True
    return False


def has_more(report: Report) -> bool:
    return any(result.status == ONLY_B for result in report.results)


def _is_copy(path: Path, source: str) -> bool:
    with translate_os_errors(source), open_stream(source) as view:
        return is_equal(view, path)


def is_as_the_source(report: Report) -> bool:
    """Return True if the output (B) contains the whole source (A). B may have zeros for states missing in A."""
    return report.num_compared > 0 and all(result.status in (EQUAL, ONLY_B) for result in report.results)
