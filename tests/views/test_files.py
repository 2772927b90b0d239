"""`ckpt/views/files.py`: a target read without writing it, against the written files."""

from __future__ import annotations

import os
import tempfile
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.errors import CorruptError, NotFoundError
from ckpt.move.blocks import cast
from ckpt.move.reading import in_shape
from ckpt.plan.checkpoint import Checkpoint, Layout, Slot, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.planner import Copy, make_plan
from ckpt.plan.tensors import Extent, Tensor, Whole, whole
from ckpt.views import files as views
from ckpt.views.files import Views
from tests.support.moving import content_for, copies, expected_after, make_case, open_files
from tests.support.places import FIXTURES

TOY = FIXTURES / "toy-zero3"
FILLER = 0xAB


@given(copies(), st.randoms(use_true_random=False), st.integers(0, 400), st.integers(1, 300))
def test_the_part_of_a_copy_that_a_range_takes(copy: Copy, random: Any, start: int, size: int) -> None:
    """For extents with any strides and dtypes, the range equals numpy's result, and no element outside is read."""
    source = np.frombuffer(content_for(copy, random.randbytes(copy.source.end)), np.uint8)
    window = views._Window(start, size)
    for part in views._copies_in(copy, window):
        assert window.touches(part.target)
        bits = in_shape(source[part.source.offset : part.source.end], part.source)
        window.put_extent(part.target, cast(bits, part.source.dtype, part.target.dtype))
    after = expected_after(copy, source.tobytes(), bytes(max(start + size, copy.target.end)))
    assert bytes(window.content) == after[start : start + size]


def assert_reads(made: Views, expected: dict[str, bytes], random: Random, num_ranges: int = 60) -> None:
    """Assert that random ranges equal the expected file."""
    for name, content in expected.items():
        with made.open(name) as view:
            assert view.read() == content
            for _ in range(num_ranges):
                start, size = random.randrange(len(content) + 3), random.choice([1, 2, 7, 40, 900])
                assert view.seek(start) == view.tell() == start
                assert view.read(size) == content[start : start + size]


@pytest.mark.parametrize("buffer_size", [37, 400, 4 << 20])
def test_every_kind_of_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_size: int) -> None:
    """Two ranks, transposed, cast, in columns, without elements; headers and padding."""
    case = make_case(tmp_path)
    monkeypatch.setattr(views, "BUFFER", buffer_size)
    monkeypatch.setattr(views, "MAX_ROWS", 2)
    before = open_files()
    assert_reads(Views(case.plan, 1 << 20), case.expected, Random(0))
    assert open_files() <= before


def test_threads_read_one_file_at_a_time_each_its_own_range(tmp_path: Path) -> None:
    case = make_case(tmp_path, num_files=2, rows=400)
    made = Views(case.plan, 1 << 20)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(assert_reads, made, case.expected, Random(number), 30) for number in range(8)]
        for job in jobs:
            job.result()


def computed_case(folder: Path, calls: list[str]) -> tuple[Views, dict[str, bytes]]:
    """Make two computed weights, like merged or dequantized ones; cast one."""
    contents = {f"<{name}>": np.random.default_rng(3).random(600, np.float32) for name in "ab"}

    def compute(name: str) -> memoryview:
        calls.append(name)
        return memoryview(contents[name].tobytes())

    extents = {name: Extent.contiguous(name, 0, FLOAT32, (30, 20)) for name in contents}
    tensors = {(name, "weight"): Tensor(name, "weight", FLOAT32, (30, 20), Whole(e)) for name, e in extents.items()}
    computed = {name: lambda name=name: compute(name) for name in contents}
    checkpoint = Checkpoint(str(folder), "test", tensors, (), computed=computed)
    slots, expected = [], b"head"
    for name, dtype in zip(contents, (FLOAT32, BFLOAT16), strict=True):
        slots.append(Slot((name, "weight"), whole((30, 20)), Extent.contiguous("out", len(expected), dtype, (30, 20))))
        expected += cast(contents[name].view(np.uint32), FLOAT32, dtype).tobytes()
    file = TargetFile("out", len(expected), ((0, b"head"),), tuple(slots))
    return Views(make_plan(checkpoint, Target((file,))), 5000), {"out": expected}


def test_what_is_computed_is_computed_once(tmp_path: Path) -> None:
    calls: list[str] = []
    made, expected = computed_case(tmp_path, calls)
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(assert_reads, made, expected, Random(number)) for number in range(4)]:
            job.result()
    assert sorted(calls) == ["<a>", "<b>"]


def test_what_is_computed_is_kept_only_while_there_is_room(tmp_path: Path) -> None:
    calls: list[str] = []
    made, expected = computed_case(tmp_path, calls)
    made._max_memory = 100
    with made.open("out") as view:
        assert view.read() == expected["out"]
    assert_reads(made, expected, Random(1))
    assert len(calls) > 4 and len(made._computed) == 1


def test_a_file_of_the_source_that_was_replaced_is_no_longer_read(tmp_path: Path) -> None:
    """Its bytes may differ, and would be wrong in silence."""
    case = make_case(tmp_path, num_files=1)
    made, buffer = Views(case.plan, 1 << 20), memoryview(bytearray(100))
    assert made.read_into("out0.bin", 20, buffer) == 100
    case.sources[0].write_bytes(case.sources[0].read_bytes())
    with pytest.raises(CorruptError, match="replaced"):
        made.read_into("out0.bin", 20, buffer)
    assert made.read_into("config.json", 0, buffer) == 2  # without reading any weights


def test_memory_is_bounded_whatever_is_asked_for(tmp_path: Path) -> None:
    """A transposed, cast 64 MB weight read in 1 MB pieces takes a few buffers, not 64 MB."""
    path, shape = tmp_path / "a", (4096, 4096)
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    tensor = Tensor("w", "weight", FLOAT32, shape, Whole(Extent(str(path), 0, FLOAT32, shape, (1, 4096))))
    slot = Slot(("w", "weight"), whole(shape), Extent.contiguous("out", 0, BFLOAT16, shape))
    checkpoint = Checkpoint(str(tmp_path), "test", {("w", "weight"): tensor}, (SourceFile.stat(str(path)),))
    made = Views(make_plan(checkpoint, Target((TargetFile("out", 32 << 20, (), (slot,)),))), 1 << 20)
    tracemalloc.start()
    buffer = memoryview(bytearray(1 << 20))
    assert made.read_into("out", 13 << 20, buffer) == len(buffer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


class TestConversion:
    def test_reads_what_run_writes_without_writing(self, tmp_path: Path) -> None:
        conversion = ckpt.plan(ckpt.open(TOY), "hf", Layout(names="own"))
        conversion.run(tmp_path / "out", manifest=False)
        assert conversion.files == tuple(sorted(os.listdir(tmp_path / "out"), key=conversion.files.index))
        for name in conversion.files:
            with conversion.open(name) as view:
                assert view.readable() and view.seekable() and not view.writable()
                assert view.read() == (tmp_path / "out" / name).read_bytes()

    def test_safetensors_are_parsed_from_the_view(self) -> None:
        from safetensors.torch import load

        checkpoint = ckpt.open(TOY)
        with ckpt.plan(checkpoint, "hf", Layout(names="own")).open("model.safetensors") as view:
            tensors = load(view.read())
        assert tensors and all(tensor.equal(checkpoint[fqn][...].to(tensor.dtype)) for fqn, tensor in tensors.items())

    def test_a_name_that_the_target_does_not_have(self) -> None:
        conversion = ckpt.plan(ckpt.open(TOY), "hf", Layout(names="own"))
        with pytest.raises(NotFoundError, match="no such file"):
            conversion.open("../latest")

    def test_nothing_runs_behind_it(self) -> None:
        threads = threading.enumerate()
        with ckpt.plan(ckpt.open(TOY), "zero2", Layout(world_size=3)).open("latest") as view:
            view.read()
        assert set(threading.enumerate()) <= set(threads)

    def test_positions(self) -> None:
        with ckpt.plan(ckpt.open(TOY), "zero2", Layout(world_size=3)).open("latest") as view:
            size = view.seek(0, os.SEEK_END)
            assert view.read() == b"" and view.seek(-2, os.SEEK_CUR) == size - 2 and len(view.read()) == 2
            with tempfile.TemporaryFile() as plain:
                plain.write(b"x" * size)
                assert view.seek(-size, os.SEEK_END) == plain.seek(-size, os.SEEK_END) == 0
            with pytest.raises(ValueError, match="negative"):
                view.raw.seek(-1)
