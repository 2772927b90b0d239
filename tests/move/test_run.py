"""`ckpt/move/run.py`, `blocks.py`, `workers.py`, `source.py`: the byte mover against numpy."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.compare.compare import check_replicas_of
from ckpt.errors import CorruptError, SourceGoneError, StorageError, UsageError
from ckpt.move import blocks, casts, files, run
from ckpt.move import workers as threads
from ckpt.move.blocks import Batch, ComputedBatch, CopyBatch
from ckpt.move.casts import FLOATS, Overflow
from ckpt.move.files import OpenFiles, Staging
from ckpt.move.journal import JOURNAL
from ckpt.move.run import execute
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import Checkpoint, Slot, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT32, DType
from ckpt.plan.planner import Copy, make_plan
from ckpt.plan.spans import Spans
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Tensor, Whole, contiguous_strides, whole
from ckpt.stores import placeholder_files
from tests.support.killing import in_small_process, killed_before_call
from tests.support.moving import (
    UINT8,
    Case,
    byte_positions,
    content_for,
    copies,
    expected_after,
    listing,
    make_case,
    open_files,
    small_numbers,
)

FILLER = 0xAB


@dataclass
class Opened:
    """Open files: sources by path, and a target."""

    sources: dict[str, int]
    descriptor: int
    name: str = "b"
    writing: Any = dataclass_field(default_factory=threading.Lock)

    def carry_out(self, batch: Batch, buffer_size: int) -> int:
        """Return the reported count of written bytes."""
        opened = OpenFiles()
        opened.descriptor = self.sources.__getitem__  # type: ignore[method-assign]
        return sum(batch.carry_out(opened, self, buffer_size))


def batches_of(copy: Copy, buffer_size: int) -> Iterator[Batch]:
    """Yield one copy in the plan's form: arrays if it has no gaps."""
    source, target = copy.source, copy.target
    if not (source.is_contiguous and target.is_contiguous):
        return iter([CopyBatch([copy])])
    row = [np.array([number]) for number in (0, source.offset, target.offset, target.numel)]
    spans = Spans(source.dtype, target.dtype, (source.path,), row[0].astype(np.int32), *row[1:])
    return blocks.batches([spans], [], buffer_size)


def moved(copy: Copy, source: bytes, target: bytes, buffer_size: int) -> bytes:
    with tempfile.TemporaryFile() as a, tempfile.TemporaryFile() as b:
        a.write(source)
        b.write(target)
        a.flush()
        b.flush()
        opened = Opened({copy.source.path: a.fileno()}, b.fileno())
        for batch in batches_of(copy, buffer_size):
            assert opened.carry_out(batch, buffer_size) == int(batch.written()[1].sum())
        b.seek(0)
        return b.read()


@st.composite
def many_spans(draw: st.DrawFn) -> tuple[Spans, dict[str, bytes]]:
    """Draw rows of a few elements from three files, with and without gaps on either side, and the files' content."""
    source, target = draw(st.sampled_from([(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)]))
    files = {name: small_numbers(draw(st.binary(min_size=400, max_size=400))) for name in "xyz"}
    at, places = draw(st.integers(0, 9)), []
    for _ in range(draw(st.integers(1, 40))):
        numel = draw(st.integers(1, 12))
        read = draw(st.sampled_from([draw(st.integers(0, 350)), *[end for *_, end in places[-2:] if end < 350]]))
        places.append((draw(st.integers(0, 2)), read, at, numel, read + numel * source.itemsize))
        at += numel * target.itemsize + draw(st.sampled_from([0, 0, 0, 1, 6]))
    path, read_at, write_at, sizes, _ = np.array(places, np.int64).T
    return Spans(source, target, tuple(files), path.astype(np.int32), read_at, write_at, sizes), files


class TestMove:
    @given(copies(), st.randoms(use_true_random=False), st.sampled_from([8, 16, 40, 200, 4 << 20]))
    def test_what_arrives_is_what_numpy_says_and_nothing_else_is_touched(
        self, copy: Copy, random: Any, buffer_size: int
    ) -> None:
        source = content_for(copy, random.randbytes(copy.source.end + 5))
        target = bytes([FILLER]) * (copy.target.end + 5)
        assert moved(copy, source, target, buffer_size) == expected_after(copy, source, target)

    @given(many_spans(), st.sampled_from([8, 30, 200, 4 << 20]), st.integers(1, 60), st.integers(2, 40))
    def test_small_ranges_arrive_together(
        self, made: tuple[Spans, dict[str, bytes]], buffer_size: int, small: int, max_rows: int
    ) -> None:
        spans, content = made
        expected = bytes([FILLER]) * int(spans.target[-1] + 200)
        with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "_SMALL", small)
            patch.setattr(blocks, "MAX_ROWS", max_rows)
            patch.setattr(blocks, "GAP", small)
            patch.setattr(blocks, "_BATCH", 10 * small)
            opened = {name: stack.enter_context(tempfile.TemporaryFile()) for name in (*content, "target")}
            for name, file in opened.items():
                file.write(content.get(name, expected))
                file.flush()
            target = Opened({name: opened[name].fileno() for name in content}, opened["target"].fileno())
            for path, source, at, numel in zip(spans.path, spans.source, spans.target, spans.numel, strict=True):
                read = Extent.contiguous(spans.paths[path], int(source), spans.source_dtype, (int(numel),))
                copy = Copy(read, Extent.contiguous("b", int(at), spans.target_dtype, (int(numel),)))
                expected = expected_after(copy, content[read.path], expected)
            written = 0
            for batch in blocks.batches([spans], [], buffer_size):
                written += target.carry_out(batch, buffer_size)
            opened["target"].seek(0)
            assert opened["target"].read() == expected
            assert written == spans.nbytes

    @pytest.mark.parametrize("target", [FLOAT32, BFLOAT16], ids=lambda dtype: dtype.name)
    def test_neighbours_take_few_calls(self, monkeypatch: pytest.MonkeyPatch, target: DType) -> None:
        """A model's experts, in another order on several ranks: one call each took most of the time."""
        num, numel, calls = 1000, 16, []
        for name in ("preadv", "pwrite"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1])
        order = np.arange(num).reshape(2, -1).T.reshape(-1)  # gate and up interleaved in the source
        sizes = np.full(num, numel)
        at = np.arange(num) * numel * target.itemsize
        spans = Spans(FLOAT32, target, ("a", "b"), (order % 2).astype(np.int32), order // 2 * numel * 4, at, sizes)
        with tempfile.TemporaryFile() as a, tempfile.TemporaryFile() as b, tempfile.TemporaryFile() as out:
            for file in (a, b):
                file.write(np.arange(num * numel // 2, dtype=np.float32).tobytes())
                file.flush()
            opened = Opened({"a": a.fileno(), "b": b.fileno()}, out.fileno())
            assert sum(opened.carry_out(one, 4 << 20) for one in blocks.batches([spans], [], 4 << 20)) == spans.nbytes
        assert len(calls) <= 8 and {*calls} == {"preadv", "pwrite"}

    @pytest.mark.parametrize("slab", [64, 96, 2 << 20])
    def test_elements_in_turns_take_few_calls(self, monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
        """Stacked experts of gpt-oss: gate and up take turns in the file, and Megatron has them transposed."""
        monkeypatch.setattr(blocks, "_SLAB", slab)
        calls, real = [], os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *args: (calls.append(args), real(*args))[1])
        experts, width, inner = 3, 4, 5
        values = np.arange(experts * 2 * inner * width, dtype=np.float32).reshape(experts, 2 * inner, width)
        slot = Extent.contiguous("out", 8, FLOAT32, (values.size,))
        pairs = []
        for part in (0, 1):
            read = Extent(
                "a", part * inner * width * 4, FLOAT32, (experts, width, inner), (2 * inner * width, 1, width)
            )
            write = (2 * inner * width, 2 * inner, 2)
            pairs.append(Copy(read, Extent("out", 8 + 4 * part, FLOAT32, (experts, width, inner), write)))
        with tempfile.TemporaryFile() as a, tempfile.TemporaryFile() as out:
            a.write(values.tobytes())
            a.flush()
            opened = Opened({"a": a.fileno()}, out.fileno())
            made = blocks.batches([], [(Slot(("t", "weight"), whole(slot.shape), slot), pairs)], 4 << 20)
            assert sum(opened.carry_out(one, 4 << 20) for one in made) == values.nbytes
            out.seek(8)
            turns = values.reshape(experts, 2, inner, width).transpose(0, 3, 2, 1)
            assert out.read() == turns.tobytes()
        assert len(calls) == {64: experts * width, 96: experts * width // 2, 2 << 20: 1}[slab]

    @given(copies(), st.sampled_from([1, 8, 16, 40, 200]))
    def test_blocks_tile_the_copy_and_fit_the_buffer(self, copy: Copy, buffer_size: int) -> None:
        seen = []
        for source, target in blocks._blocks(copy.source, copy.target, buffer_size):
            assert source.shape == target.shape
            assert max(source.end - source.offset, source.nbytes) <= buffer_size or source.numel <= 1
            pairs = zip(byte_positions(source)[..., 0].flat, byte_positions(target)[..., 0].flat, strict=True)
            seen += list(pairs)
        every = zip(byte_positions(copy.source)[..., 0].flat, byte_positions(copy.target)[..., 0].flat, strict=True)
        assert sorted(seen) == sorted(every)

    def test_an_element_that_is_repeated_is_not_repeated_in_memory_at_once(self) -> None:
        """An expanded tensor has stride 0, a four-byte file, and many elements."""
        shape = (100, 50)
        copy = Copy(Extent("a", 0, FLOAT32, shape, (0, 0)), Extent.contiguous("b", 0, FLOAT32, shape))
        assert moved(copy, b"abcd", bytes(20_000), 400) == b"abcd" * 5000
        assert all(source.nbytes <= 400 for source, _ in blocks._blocks(copy.source, copy.target, 400))

    @pytest.mark.parametrize("shape", [(64,), (8, 8)])
    def test_a_file_that_ends_too_early(self, shape: tuple[int, ...]) -> None:
        strides = contiguous_strides(shape)[::-1]  # transposed if there are two dims
        copy = Copy(Extent("a.bin", 0, UINT8, shape, strides), Extent.contiguous("b.bin", 0, UINT8, shape))
        with pytest.raises(CorruptError, match="ends inside") as caught:
            moved(copy, bytes(50), bytes(64), 16)
        assert (caught.value.exit_code, caught.value.path) == (4, "a.bin")
        assert caught.value.found == "end of file at byte 50"

    @pytest.mark.parametrize("target", [FLOAT32, BFLOAT16], ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("strides", [(9, 1), (1, 7)], ids=["as it is", "transposed"])
    def test_short_reads_and_writes_go_on(
        self, monkeypatch: pytest.MonkeyPatch, strides: tuple[int, ...], target: DType
    ) -> None:
        preadv, pwrite = os.preadv, os.pwrite
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
        source = Extent("a", 3, FLOAT32, (7, 9), strides)
        copy = Copy(source, Extent.contiguous("b", 5, target, (7, 9)))
        data, before = content_for(copy, os.urandom(source.end)), bytes(copy.target.end)
        assert moved(copy, data, before, 64) == expected_after(copy, data, before)

    @pytest.mark.parametrize("more", [-1, 0, 1])
    @pytest.mark.parametrize("size", [blocks._SMALL, blocks.WINDOW, blocks._BATCH, blocks._SPAN, 2 * blocks._SPAN])
    def test_sizes_around_what_is_copied_at_a_time(self, size: int, more: int) -> None:
        data, before = os.urandom(size + more + 10), bytes(size + more + 10)
        shape = (size + more,)
        copy = Copy(Extent.contiguous("a", 3, UINT8, shape), Extent.contiguous("b", 5, UINT8, shape))
        assert moved(copy, data, before, blocks.BUFFER) == bytes(5) + data[3:-7] + bytes(5)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path / "source")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a tensor into many parts, and a part into several batches."""
    monkeypatch.setattr(blocks, "_SPAN", 200)
    monkeypatch.setattr(blocks, "_BATCH", 300)
    monkeypatch.setattr(blocks, "_SLAB", 150)
    monkeypatch.setattr(blocks, "_SMALL", 50)
    monkeypatch.setattr(blocks, "WINDOW", 200)


def only(threads: set[threading.Thread]) -> bool:
    """Return True if only these threads are left after the released ones have finished their piece."""
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    return set(threading.enumerate()) <= threads


@pytest.fixture(autouse=True)
def nothing_left_over(tmp_path: Path) -> Iterator[None]:
    """Assert after every test that no thread is running and no descriptor is open."""
    threads, descriptors = set(threading.enumerate()), open_files()
    yield
    deadline = time.monotonic() + 5
    while not open_files() <= descriptors and time.monotonic() < deadline:
        gc.collect()  # objects in an exception's frames, or held by a thread that has just ended
    assert only(threads)
    assert open_files() <= descriptors


@pytest.mark.usefixtures("real_fsync")
class TestExecute:
    @pytest.mark.parametrize("workers", [0, 1, 2, 7, -1])
    def test_every_file_arrives(self, tmp_path: Path, case: Case, small_pieces: None, workers: int) -> None:
        written: list[int] = []
        execute(case.plan, tmp_path / "out", resources=Resources(workers=workers), progress=written.append)
        case.assert_written(tmp_path / "out")
        assert sum(written) == case.plan.moved_bytes
        assert case.plan.moved_bytes == case.plan.span_bytes + case.plan.buffered_bytes > 0
        assert listing(tmp_path) == ["out", "source"]

    @pytest.mark.parametrize("workers", [2, 7])
    def test_few_target_files_are_open_at_a_time_and_each_is_synced(
        self, tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, workers: int
    ) -> None:
        case = make_case(tmp_path / "source", num_files=9)
        staged: list[int] = []
        synced: set[str] = set()
        real = files.sync

        def sync(descriptor: int) -> None:
            # Only files in both listings were open between them.
            names = {path for _, path in open_files()} & {path for _, path in open_files()}
            staged.append(len([path for path in names if ".ckpt-staging/" in path and JOURNAL not in path]))
            real(descriptor)
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

        for module in (run, threads):
            monkeypatch.setattr(module, "MAX_UNFINISHED", 3)
        monkeypatch.setattr(threads, "sync", sync)
        execute(case.plan, tmp_path / "out", resources=Resources(workers=workers))
        case.assert_written(tmp_path / "out")
        assert max(staged) <= 3 + 1  # and one more waiting for its turn
        assert synced == {Path(name).name for name in case.expected}

    def test_a_file_that_waits_for_room_is_closed_when_another_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case, real = make_case(tmp_path / "source", num_files=9), os.pwrite

        def full(descriptor: int, data: memoryview, offset: int) -> int:
            if offset > 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data, offset)

        for module in (run, threads):
            monkeypatch.setattr(module, "MAX_UNFINISHED", 1)
        monkeypatch.setattr(os, "pwrite", full)
        gc.disable()  # nothing but reference counts closes files
        try:
            with pytest.raises(StorageError):
                execute(case.plan, tmp_path / "out")
            assert not [path for _, path in open_files() if ".ckpt-staging/" in path]
        finally:
            gc.enable()

    def test_parts_are_as_small_as_they_should_be(self, case: Case, small_pieces: None) -> None:
        for file in case.plan.target.files:
            batches = [*blocks.batches(case.plan.spans(file), case.plan.copies(file), 4 << 20)]
            parts = [part for batch in batches if isinstance(batch, CopyBatch) for part in batch.copies]
            assert all(part.source.end - part.source.offset <= 200 for part in parts)
            sizes = np.concatenate([np.zeros(1, np.int64), *(batch.written()[1] for batch in batches)])
            assert sizes.max() <= 200 and all(batch.written()[1].sum() <= 300 + 200 for batch in batches)
            assert sizes.sum() == sum(extent.nbytes for extent in file.filled)

    def test_rows_of_several_ranks_are_written_together(
        self, tmp_path: Path, case: Case, small_pieces: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row parallel weight has one piece per rank: a write for each took most of the time."""
        sizes, real = [], os.pwrite

        def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
            sizes.append(len(data))
            return real(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        execute(case.plan, tmp_path / "out")
        case.assert_written(tmp_path / "out")
        assert not {2 * 4, 4 * 4} & set(sizes)
        in_fp32, in_bf16, files = 150 // 24, 150 // 12, 3
        assert in_fp32 * 24 == in_bf16 * 12 == 144
        assert sizes.count(144) == files * (40 // in_fp32 + 40 // in_bf16)

    def test_more_sources_than_may_be_open(
        self, tmp_path: Path, case: Case, small_pieces: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "_OPEN_FILES", 1)
        execute(case.plan, tmp_path / "out")
        case.assert_written(tmp_path / "out")

    def test_without_sync_file_range(self, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threads, "_sync_file_range", None)
        execute(case.plan, tmp_path / "out")
        case.assert_written(tmp_path / "out")

    def test_an_error_of_the_progress_display_is_the_callers(self, tmp_path: Path, case: Case) -> None:
        def broken(_: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            execute(case.plan, tmp_path / "out", progress=broken)
        assert listing(tmp_path) == ["source"]

    def test_a_thread_that_cannot_be_started(self, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        started, real = [0], threading.Thread.start

        def start(thread: threading.Thread) -> None:
            started[0] += 1
            if started[0] == 3:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            execute(case.plan, tmp_path / "out", resources=Resources(workers=4))
        assert listing(tmp_path) == ["source"]

    def test_replicas_that_disagree_stop_it_before_anything_is_written(self, tmp_path: Path) -> None:
        for name, content in (("a.bin", b"abcdefgh"), ("b.bin", b"abcdefgX")):
            (tmp_path / name).write_bytes(content)
        a, b = (Extent.contiguous(str(tmp_path / name), 0, FLOAT32, (2,)) for name in ("a.bin", "b.bin"))
        tensor = Tensor("w", "weight", FLOAT32, (2,), Whole(a, 0), replicas=(Whole(b, 1),))
        slot = Slot(("w", "weight"), whole((2,)), Extent.contiguous("out.bin", 0, FLOAT32, (2,)))
        checkpoint = Checkpoint(str(tmp_path), "test", {("w", "weight"): tensor}, ())
        plan = make_plan(checkpoint, Target((TargetFile("out.bin", 8, (), (slot,)),)))
        with pytest.raises(CorruptError):
            execute(plan, tmp_path / "out", check=partial(check_replicas_of, plan.checkpoint))
        assert listing(tmp_path) == ["a.bin", "b.bin"]

    def test_a_copied_file_that_is_replaced(self, tmp_path: Path) -> None:
        source = tmp_path / "more.bin"
        source.write_bytes(bytes(range(250)) * 9)
        copied = TargetFile.of_copy("deep/more.bin", SourceFile.stat(str(source)))
        plan = make_plan(Checkpoint(str(tmp_path), "test", {}, ()), Target((copied,)))
        execute(plan, tmp_path / "out")
        assert (tmp_path / "out" / "deep" / "more.bin").read_bytes() == source.read_bytes()
        with pytest.raises(CorruptError, match="replaced"):
            execute(plan, tmp_path / "again", check=source.touch)
        with pytest.raises(UsageError, match="overlap"):
            execute(plan, source, overwrite=True)
        assert listing(tmp_path) == ["more.bin", "out"]

    def test_a_destination_that_holds_a_file_of_the_source(self, tmp_path: Path, case: Case) -> None:
        """The checkpoint's folder may contain many links into it."""
        with pytest.raises(UsageError, match="overlap"):
            execute(case.plan, tmp_path / "source", overwrite=True)
        (tmp_path / "link").symlink_to(tmp_path / "source")
        with pytest.raises(UsageError, match="overlap"):
            execute(case.plan, tmp_path / "link", overwrite=True)
        assert listing(tmp_path / "source") == ["rank0.bin", "rank1.bin", "rank2.bin"]


class TestMemory:
    def test_as_many_threads_as_keep_a_disk_busy_where_there_is_memory_for_them(self) -> None:
        assert [Resources().num_workers, Resources(workers=3).num_workers] == [8, 3]
        assert Resources().num_hashers <= (os.cpu_count() or 1)
        assert [Resources(max_memory=size << 20).num_workers for size in (4, 2, 1)] == [8, 8, 4]
        on_a_node = [threads.Workers(Resources(), lambda _: None, num_here=number).num_fillers for number in (1, 2, 16)]
        assert on_a_node == [8, 4, 1]
        assert threads.Workers(Resources(workers=3), lambda _: None, num_here=2).num_fillers == 3
        least = Resources(max_memory=1 << 20)
        assert 4 * least.num_workers * least.buffer_size <= least.max_memory

    @pytest.mark.parametrize("cores", [1, 2])
    def test_no_more_threads_cast_than_there_are_cores(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
    ) -> None:
        case = make_case(tmp_path / "source", rows=4000)
        inside, most, lock, real = [0], [0], threading.Lock(), blocks.cast_bits

        def watched(bits: NDArray, source: DType, target: DType, over: Overflow) -> NDArray:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            result = real(bits, source, target, over)
            with lock:
                inside[0] -= 1
            return result

        monkeypatch.setattr(blocks, "cast_bits", watched)
        monkeypatch.setattr(blocks, "_BATCH", 8 << 10)
        monkeypatch.setattr(threads, "num_cores", lambda: cores)
        monkeypatch.setattr(placeholder_files, "in_use", lambda: True)  # from a store
        execute(case.plan, tmp_path / "out", resources=Resources(workers=8))
        case.assert_written(tmp_path / "out")
        assert 1 <= most[0] <= cores

    def test_too_little_is_refused_before_anything_is_made(self, tmp_path: Path, case: Case) -> None:
        with pytest.raises(UsageError, match="too small") as caught:
            execute(case.plan, tmp_path / "out", resources=Resources(max_memory=1000, workers=2))
        assert (caught.value.exit_code, caught.value.expected) == (2, f"at least {8 * threads._MIN_BUFFER // 1024}KiB")
        assert listing(tmp_path) == ["source"]

    @pytest.mark.parametrize("workers", [1, 3])
    def test_it_stays_within_its_bound(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
        """The tensors are many times larger than the buffers."""
        monkeypatch.setattr(casts, "_CACHE_SIZED", 1 << 10)  # otherwise a cast's temporaries outweigh these buffers
        case = make_case(tmp_path / "source", num_files=3, rows=2700 * workers)
        resources = Resources(max_memory=4 * threads._MIN_BUFFER * workers, workers=workers)
        bound = resources.peak_buffers(case.plan)
        assert bound <= resources.max_memory < case.plan.total_bytes // 1.5
        compared = threading.Event()

        def start_measuring(_: int) -> None:
            if not compared.is_set():  # replicas have been compared and their buffers freed
                compared.set()
                tracemalloc.reset_peak()

        tracemalloc.start()
        try:
            execute(case.plan, tmp_path / "out", resources=resources, progress=start_measuring)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        case.assert_written(tmp_path / "out")
        assert peak < bound + (256 << 10)

    @pytest.mark.parametrize("source", FLOATS, ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("target", FLOATS, ids=lambda dtype: dtype.name)
    def test_no_buffer_of_a_cast_is_larger_than_it_may_be(
        self, monkeypatch: pytest.MonkeyPatch, source: DType, target: DType
    ) -> None:
        sizes, real = [], blocks.cast_bits

        def watched(bits: NDArray, a: DType, b: DType, over: Overflow) -> NDArray:
            result = real(bits, a, b, over)
            sizes.extend([bits.nbytes, result.nbytes])
            return result

        monkeypatch.setattr(blocks, "cast_bits", watched)
        copy = Copy(Extent("a", 0, source, (9, 40), (1, 9)), Extent.contiguous("b", 0, target, (9, 40)))
        data = content_for(copy, os.urandom(copy.source.end))
        expected = expected_after(copy, data, bytes(copy.target.end))
        assert moved(copy, data, bytes(copy.target.end), 64) == expected
        assert max(sizes, default=0) <= 64


class TestSourcesThatChange:
    @pytest.mark.parametrize("existing", [False, True])
    @pytest.mark.parametrize("how", ["replaced", "longer", "rewritten", "touched", "gone"])
    def test_while_they_are_read(self, tmp_path: Path, case: Case, how: str, existing: bool) -> None:
        victim, out = case.sources[1], tmp_path / "out"
        content = victim.read_bytes()

        def change(_: int) -> None:
            if how == "replaced":
                (tmp_path / "new").write_bytes(content)
                os.replace(tmp_path / "new", victim)
            elif how == "longer":
                with victim.open("ab") as file:
                    file.write(b"!")
            elif how == "rewritten":
                victim.write_bytes(content[::-1])
            elif how == "touched":
                os.utime(victim, ns=(0, 0))
            else:
                victim.unlink(missing_ok=True)

        if existing:
            out.mkdir()
            (out / "old").write_bytes(b"old")
        with pytest.raises(CorruptError) as caught:
            execute(case.plan, out, overwrite=True, resources=Resources(workers=1), progress=change)
        assert (caught.value.exit_code, caught.value.path) == (4, str(victim))
        assert (out / "old").read_bytes() == b"old" if existing else not out.exists()
        hidden = [name for name in listing(tmp_path) if name.startswith(".")]
        assert hidden == ([".out.ckpt-staging"] if how == "gone" and kept(caught.value) else [])

    def test_a_folder_that_is_away_for_a_while(self, tmp_path: Path, case: Case) -> None:
        """Finished work is kept and used when the folder is back."""
        source, away = tmp_path / "source", tmp_path / "away"

        def take_away(_: Path) -> dict[str, bytes]:
            source.rename(away)
            return {}

        with pytest.raises(SourceGoneError) as caught:
            execute(case.plan, tmp_path / "out", describe=lambda folder, _: take_away(folder))
        assert caught.value.exit_code == 4 and kept(caught.value)
        away.rename(source)
        assert execute(case.plan, tmp_path / "out") == case.plan.moved_bytes
        case.assert_written(tmp_path / "out")
        assert listing(tmp_path) == ["out", "source"]

    def test_before_they_are_read(self, tmp_path: Path, case: Case) -> None:
        """A file was deleted or truncated after its metadata was read."""
        content = case.sources[0].read_bytes()
        case.sources[0].write_bytes(content[:100])
        with pytest.raises(CorruptError, match="ends inside"):
            execute(case.plan, tmp_path / "out")
        case.sources[0].unlink()
        with pytest.raises(CorruptError, match="has gone"):  # one worker, which has finished nothing yet
            execute(case.plan, tmp_path / "out", resources=Resources(workers=1))
        assert listing(tmp_path) == ["source"]

    def test_a_source_that_may_not_be_looked_at(
        self, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(path: str) -> SourceFile:
            raise PermissionError(errno.EACCES, "Permission denied", path)

        monkeypatch.setattr(SourceFile, "stat", denied)
        with pytest.raises(StorageError, match="Permission denied") as caught:
            execute(case.plan, tmp_path / "out")
        assert listing(tmp_path) == [".out.ckpt-staging", "source"] and kept(caught.value)


def kept(error: BaseException) -> bool:
    """Return True if an error has the note about kept work."""
    notes = getattr(error, "__notes__", [])
    assert all(re.fullmatch(r"kept: \S+ \S+ in \S+\.ckpt-staging; rerun the command to continue", one) for one in notes)
    return len(notes) == 1


class Nth:
    """A function of `os` or another `module` that fails on the Nth call counted by `counts`."""

    def __init__(
        self, name: str, code: int, counts: Callable[..., bool] = lambda *_: True, module: ModuleType = os
    ) -> None:
        self.name, self.code, self.counts, self.module = name, code, counts, module
        self.real = getattr(module, name)
        self.number = self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.calls += self.counts(*args)
            fails = self.calls == self.number and self.counts(*args)
        if not fails:
            return self.real(*args, **kwargs)
        raise OSError(self.code, os.strerror(self.code))


def in_staging(descriptor: int, *_: Any) -> bool:
    return ".ckpt-staging/" in os.readlink(f"/proc/self/fd/{descriptor}")


def of_source(descriptor: int, *_: Any) -> bool:
    return not in_staging(descriptor)


def a_source(path: Any, flags: int, *_: Any) -> bool:
    return "rank" in str(path)


FAILURES = {
    "the disk while a buffer is written": Nth("pwrite", errno.EIO),
    "no space while a buffer is written": Nth("pwrite", errno.ENOSPC),
    "over quota while a buffer is written": Nth("pwrite", errno.EDQUOT),
    "the disk while a buffer is read": Nth("preadv", errno.EIO),
    "the disk while it is synced": Nth("fsync", errno.EIO, in_staging),
    "no space while a file is made": Nth("ftruncate", errno.ENOSPC),
    "no inode for a new file": Nth("FileIO", errno.ENOSPC, module=files),
    "too many open files": Nth("open", errno.EMFILE, a_source),
}


class TestEveryCallFailsOnce:
    @pytest.mark.parametrize("existing", [False, True])
    @pytest.mark.parametrize("name", FAILURES)
    def test_nothing_is_left_of_it_but_what_is_noted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None, name: str, existing: bool
    ) -> None:
        """Fail the first call, then the second and so on until no call is left to fail (SQLite's method)."""
        case, out, failure = make_case(tmp_path / "source", num_files=2, rows=8), tmp_path / "out", FAILURES[name]
        if existing:
            out.mkdir()
            (out / "old").write_bytes(b"old")
        before = listing(tmp_path)
        threads, descriptors = set(threading.enumerate()), open_files()
        monkeypatch.setattr(failure.module, failure.name, failure)
        number, is_kept = 0, list[bool]()
        while True:
            number += 1
            failure.number, failure.calls = number, 0
            try:
                execute(case.plan, out, overwrite=True, restart=True, resources=Resources(workers=2))
            except StorageError as error:
                is_kept.append(kept(error))
                assert error.exit_code == 7
                assert os.strerror(failure.code) in str(error)
                assert (error.hint is not None) == (failure.code in (errno.ENOSPC, errno.EDQUOT))
            else:
                break
            there = [".out.ckpt-staging", *before] if is_kept[-1] else before
            assert listing(tmp_path) == there, f"call {number}"
            if existing:
                assert (out / "old").read_bytes() == b"old" and listing(out) == ["old"]
            assert only(threads), f"call {number}"
            assert open_files() <= descriptors, f"call {number}"
        assert number > 2, "no call was made to fail"
        assert failure.calls < number
        case.assert_written(out)

    def test_a_close_that_reports_a_late_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
    ) -> None:
        """Network filesystems may write only on close."""
        case, real = make_case(tmp_path / "source", num_files=2, rows=8), Staging.create

        class Late(io.FileIO):
            def close(self) -> None:
                was_open = not self.closed
                super().close()
                if was_open:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

        for number in range(len(case.expected)):
            made: list[str] = []

            def create(staging: Staging, name: str, size: int, late: int = number, made: list[str] = made) -> io.FileIO:
                file = real(staging, name, size)
                made.append(name)
                return file if len(made) <= late else Late(os.dup(file.fileno()), "r+")

            monkeypatch.setattr(Staging, "create", create)
            with pytest.raises(StorageError, match="Input/output error"):
                execute(case.plan, tmp_path / "out", restart=True, resources=Resources(workers=2))
            assert "out" not in listing(tmp_path)

    def test_buffered_reads_of_plain_spans(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
    ) -> None:
        case, failure, number = (
            make_case(tmp_path / "source", num_files=1, rows=8),
            Nth("preadv", errno.EIO, of_source),
            0,
        )
        monkeypatch.setattr(os, "preadv", failure)
        while True:
            number += 1
            failure.number, failure.calls = number, 0
            try:
                execute(case.plan, tmp_path / "out", restart=True)
            except StorageError as error:
                assert error.path == str(case.sources[0]), "the file that could not be read is named"
                assert "out" not in listing(tmp_path)
            else:
                break
        assert number > 2
        case.assert_written(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("existing", [False, True])
@in_small_process
def test_killed_at_any_call(tmp_path: Path, existing: bool) -> None:
    """Before any thread's system call, the output is old, absent or complete."""
    cut_small(pytest.MonkeyPatch())
    case, out = make_case(tmp_path / "source", num_files=2, rows=8), tmp_path / "out"
    number = complete = ended = 0
    while ended < 3:  # threads sometimes join calls, so the numbers differ, and one run may end before its kill
        number += 1
        if existing:
            out.mkdir()
            (out / "old").write_bytes(b"old")
        if not killed_before_call(
            number, lambda: execute(case.plan, out, overwrite=True, resources=Resources(workers=2))
        ):
            case.assert_written(out)
            ended += 1
        elif out.exists() and listing(out) != ["old"]:
            case.assert_written(out)
            complete += 1
        else:
            assert out.exists() == existing, f"killed before call {number}"
        execute(case.plan, out, overwrite=True)
        case.assert_written(out)
        assert listing(tmp_path) == ["out", "source"], f"killed before call {number}"
        shutil.rmtree(out)
    assert number > 40 and complete


class TestCompleteAndNotMoved:
    """A conversion stopped after its last write: nothing is written again."""

    @staticmethod
    def goes_on(case: Case, out: Path, error: BaseException) -> None:
        assert kept(error)
        assert execute(case.plan, out) == case.plan.moved_bytes
        case.assert_written(out)
        assert listing(out.parent) == ["out", "source"]

    def test_the_destination_has_appeared(self, tmp_path: Path, case: Case) -> None:
        out = tmp_path / "out"

        def appear(phase: str, _: int) -> None:
            if phase == "commit":
                out.mkdir()
                (out / "another's").write_bytes(b"1")

        with pytest.raises(UsageError, match="the destination exists") as caught:
            execute(case.plan, out, phase=appear)
        assert listing(out) == ["another's"]
        shutil.rmtree(out)
        self.goes_on(case, out, caught.value)

    def test_interrupted_before_the_rename(self, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_: Staging) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            patch.setattr(Staging, "commit", interrupted)
            execute(case.plan, tmp_path / "out")
        self.goes_on(case, tmp_path / "out", caught.value)


class TestInterrupt:
    @staticmethod
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def test_between_two_pieces(self, tmp_path: Path, case: Case, small_pieces: None) -> None:
        pressed = threading.Event()

        def press(_: int) -> None:
            if not pressed.is_set():
                pressed.set()
                self.interrupt()

        with pytest.raises(KeyboardInterrupt) as caught:
            execute(case.plan, tmp_path / "out", progress=press, resources=Resources(workers=2))
            time.sleep(5)  # if the run ended early, the signal arrives here
        assert pressed.is_set()
        there = [".out.ckpt-staging", "source"] if kept(caught.value) else ["source"]
        assert listing(tmp_path) == there or (tmp_path / "out").exists()

    @pytest.mark.parametrize("existing", [False, True])
    def test_while_the_disk_hangs(
        self, tmp_path: Path, case: Case, small_pieces: None, monkeypatch: pytest.MonkeyPatch, existing: bool
    ) -> None:
        """It ends within a second, although no thread can; their later writes go nowhere."""
        hanging, release, real = threading.Event(), threading.Event(), os.pwrite

        def hang(descriptor: int, data: memoryview, offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                hanging.set()
                release.wait()
            return real(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", hang)
        out = tmp_path / "out"
        if existing:
            out.mkdir()
            (out / "old").write_bytes(b"old")
        before = listing(tmp_path)

        def press() -> None:
            hanging.wait()
            self.interrupt()

        presser = threading.Thread(target=press)
        presser.start()
        others = set(threading.enumerate())
        try:
            with pytest.raises(KeyboardInterrupt):
                execute(case.plan, out, overwrite=True, resources=Resources(workers=2))
            assert listing(tmp_path) == before
            assert not existing or listing(out) == ["old"]
        finally:
            release.set()
            presser.join()
            workers = set(threading.enumerate()) - others
            for thread in workers:
                thread.join()
        assert workers, "the threads were still in the kernel when it returned"
        assert listing(tmp_path) == before

    def test_a_second_one_is_not_needed(self, tmp_path: Path, case: Case, small_pieces: None) -> None:
        """After an interrupt, the same conversion succeeds in the same process."""
        calls: list[int] = []

        def press(_: int) -> None:
            calls.append(1)
            if len(calls) == 1:
                self.interrupt()

        with pytest.raises(KeyboardInterrupt):
            execute(case.plan, tmp_path / "out", overwrite=True, progress=press)
            time.sleep(5)
        execute(case.plan, tmp_path / "out", overwrite=True)
        case.assert_written(tmp_path / "out")


@settings(max_examples=30)
@given(st.integers(1, 17), st.integers(1, 17), st.integers(0, 40), st.sampled_from([0, 1, 2]))
def test_from_any_world_size_to_any_other(ranks_in: int, ranks_out: int, numel: int, workers: int) -> None:
    """A tensor is cut among some ranks and written for others, also with more ranks than elements."""
    with tempfile.TemporaryDirectory() as folder:
        data = np.random.default_rng(numel).bytes(4 * numel)
        fragments, seen = [], []
        for rank in range(ranks_in):
            start, stop = (min(numel, r * -(-numel // ranks_in)) for r in (rank, rank + 1))
            path = f"{folder}/in{rank}"
            Path(path).write_bytes(data[4 * start : 4 * stop])
            seen.append(SourceFile.stat(path))
            fragments.append(
                Fragment(FlatRange(start, stop), Extent.contiguous(path, 0, FLOAT32, (stop - start,)), rank)
            )
        tensor = Tensor("w", "weight", FLOAT32, (numel,), Pieces(tuple(fragments)))
        files, expected = [], {}
        for rank in range(ranks_out):
            start, stop = (min(numel, r * -(-numel // ranks_out)) for r in (rank, rank + 1))
            extent = Extent.contiguous(f"out{rank}", 0, FLOAT32, (stop - start,))
            slot = Slot(("w", "weight"), Box((start,), (stop - start,)), extent)
            files.append(TargetFile(f"out{rank}", extent.nbytes, (), (slot,)))
            expected[f"out{rank}"] = data[4 * start : 4 * stop]
        checkpoint = Checkpoint(folder, "test", {("w", "weight"): tensor}, tuple(seen))
        plan = make_plan(checkpoint, Target(tuple(files)))
        execute(plan, Path(folder) / "out", resources=Resources(workers=workers))
        assert {p.name: p.read_bytes() for p in (Path(folder) / "out").iterdir()} == expected


def test_computed_parts_arrive_where_the_whole_would(tmp_path: Path) -> None:
    content = bytes(range(60))

    class Content:
        def __call__(self) -> memoryview:
            return memoryview(content)

        def parts(self) -> Iterator[memoryview]:
            return (memoryview(content)[start : start + 7] for start in range(0, 60, 7))

    def bytes_at(path: str, offset: int, size: int) -> Extent:
        return Extent.contiguous(path, offset, UINT8, (size,))

    places = (((5, 20), 30), ((25, 35), 50), ((0, 5), 0))
    placed = [Copy(bytes_at("", *of), bytes_at("out", to, of[1])) for of, to in places]
    written = []
    for made in (Content(), Content().__call__):
        with (tmp_path / "out").open("w+b") as file:
            batch = ComputedBatch(placed, made, contextlib.nullcontext())
            assert Opened({}, file.fileno()).carry_out(batch, 1 << 20) == 60
        written.append((tmp_path / "out").read_bytes())
    assert written[0] == written[1] and len(written[0]) == 85
