"""Copies, made-up checkpoints and open files, for tests that move bytes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.move.casts import FLOATS, cast_bits, storage_dtype
from ckpt.plan.checkpoint import Checkpoint, Slot, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import ALL, BFLOAT16, BY_NAME, FLOAT32
from ckpt.plan.planner import Copy, Plan, make_plan
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Tensor, Whole, whole
from tests.support.strategies import extents, shapes

UINT8, INT32 = BY_NAME["uint8"], BY_NAME["int32"]


def small_numbers(content: bytes) -> bytes:
    """Return bytes below 64: at any offset, numbers below 2 in every dtype, which no cast makes infinite."""
    return (np.frombuffer(content, np.uint8) & 0x3F).tobytes()


def content_for(copy: Copy, content: bytes) -> bytes:
    return small_numbers(content) if copy.source.dtype != copy.target.dtype else content


def byte_positions(extent: Extent) -> NDArray:
    """Return the byte positions of every element in an extent. The last dim is the byte within the element."""
    found = np.full((*extent.shape, extent.dtype.itemsize), extent.offset)
    for dim, (size, stride) in enumerate(zip(extent.shape, extent.strides, strict=True)):
        along = [1] * (len(extent.shape) + 1)
        along[dim] = size
        found += (np.arange(size) * stride * extent.dtype.itemsize).reshape(along)
    return found + np.arange(extent.dtype.itemsize)


def expected_after(copy: Copy, source: bytes, target: bytes) -> bytes:
    """Return `target` after the copy, byte by byte."""
    elements = np.frombuffer(source, np.uint8)[byte_positions(copy.source)]
    bits = np.ascontiguousarray(elements).reshape(-1).view(storage_dtype(copy.source.dtype))
    if copy.source.dtype != copy.target.dtype:
        bits = cast_bits(bits, copy.source.dtype, copy.target.dtype)
    after = np.frombuffer(target, np.uint8).copy()
    after[byte_positions(copy.target)] = bits.view(np.uint8).reshape(*copy.target.shape, copy.target.dtype.itemsize)
    return after.tobytes()


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Draw two extents with the same shape, and perhaps a cast.

    Each extent is contiguous, transposed or has gaps, and begins at any byte.
    """
    shape = draw(shapes())
    source_dtype = draw(st.sampled_from(ALL))
    target_dtype = draw(st.sampled_from(FLOATS)) if source_dtype in FLOATS else source_dtype
    sides = []
    for path, dtype in (("a", source_dtype), ("b", target_dtype)):
        extent, _ = draw(extents(whole(shape), path, dtype))
        sides.append(Extent(path, extent.offset + draw(st.integers(0, 3)), dtype, shape, extent.strides))
    return Copy(*sides)


@dataclass(frozen=True)
class Case:
    """A plan with every kind of copy, and the expected files."""

    plan: Plan
    expected: dict[str, bytes]
    sources: list[Path]

    def assert_written(self, destination: Path) -> None:
        found = {str(p.relative_to(destination)): p.read_bytes() for p in destination.rglob("*") if p.is_file()}
        assert found == self.expected


def make_case(folder: Path, num_files: int = 3, rows: int = 40) -> Case:
    """Make target files with a header, padding, and tensors from two ranks: transposed, cast, empty, and in columns."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    tensors: dict[tuple[str, str], Tensor] = {}
    files, expected, sources = [], {}, []
    for number in range(num_files):
        shape, path = (rows, 6), str(folder / f"rank{number}.bin")
        content = small_numbers(random.bytes(4 * prod(shape) * 3 + 11))
        Path(path).write_bytes(content)
        sources.append(Path(path))
        size, plain = 4 * prod(shape), 7
        half = prod(shape) // 2 + 1
        fragments = []
        for rank, (start, stop) in enumerate([(0, half), (half, prod(shape))]):
            extent = Extent.contiguous(path, plain + 4 * start, INT32, (stop - start,))
            fragments.append(Fragment(FlatRange(start, stop), extent, rank))
        turned = Extent(path, plain + size, FLOAT32, shape, (1, shape[0]))
        made = [
            Tensor(f"plain{number}", "weight", INT32, shape, Pieces(tuple(fragments))),
            Tensor(f"turned{number}", "weight", FLOAT32, shape, Pieces((Fragment(whole(shape), turned, 0),))),
            Tensor(
                f"cast{number}", "weight", FLOAT32, shape, Whole(Extent.contiguous(path, 11 + 2 * size, FLOAT32, shape))
            ),
            Tensor(f"empty{number}", "weight", FLOAT32, (0, 6), Whole(Extent.contiguous(path, 0, FLOAT32, (0, 6)))),
        ]
        for name in ("columns", "cast columns"):  # three parts: some rows in two columns, the other rows, four columns
            boxes = Box((0, 0), (rows // 3, 2)), Box((rows // 3, 0), (rows - rows // 3, 2)), Box((0, 2), (rows, 4))
            parts = [Extent.contiguous(path, 3 + 5 * rank, FLOAT32, box.sizes) for rank, box in enumerate(boxes)]
            columns = tuple(
                Fragment(box, part, rank) for rank, (box, part) in enumerate(zip(boxes, parts, strict=True))
            )
            made.append(Tensor(f"{name}{number}", "weight", FLOAT32, shape, Pieces(columns)))
        tensors |= {(tensor.fqn, tensor.role): tensor for tensor in made}
        name = f"part/out{number}.bin" if number else "out0.bin"
        output, at, slots = b"header %d: " % number, 10, []
        for tensor in made:
            dtype = BFLOAT16 if tensor.fqn.startswith("cast") else tensor.dtype
            extent = Extent.contiguous(name, at, dtype, tensor.shape)
            slots.append(Slot((tensor.fqn, tensor.role), whole(tensor.shape), extent))
            at = extent.end
        output = output.ljust(at, b"\0") + b"\0" * 6
        for tensor, slot in zip(made, slots, strict=True):
            for fragment in tensor.fragments():
                part = slot.extent
                if isinstance(fragment.region, FlatRange):
                    part = slot.extent.flat(fragment.region.start, fragment.region.stop)
                else:
                    part = slot.extent.narrow(fragment.region)
                output = expected_after(Copy(fragment.extent, part), content, output)
        expected[name] = output
        files.append(TargetFile(name, at + 6, ((0, b"header %d: " % number),), tuple(slots), ((at, 6),)))
    expected["config.json"] = b"{}"
    files.append(TargetFile.of_bytes("config.json", b"{}"))
    seen = tuple(SourceFile.stat(str(path)) for path in sources)
    expected["copied/rank0.bin"] = sources[0].read_bytes()
    files.append(TargetFile.of_copy("copied/rank0.bin", seen[0]))
    return Case(make_plan(Checkpoint(str(folder), "test", tensors, seen), Target(tuple(files))), expected, sources)


def open_files() -> set[tuple[str, str]]:
    """Return open descriptors and their targets, except for the listing's own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
