"""`ckpt/compare/compare.py`: every flipped bit is found, with its index, for any cut of both sides."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.compare import compare as compare_module
from ckpt.compare.compare import Difference, Reader, check_replicas, compare, narrower
from ckpt.errors import CorruptError, NotFoundError
from ckpt.move import files
from ckpt.move.casts import cast_bits
from ckpt.plan.dtypes import ALL, BFLOAT16, BOOL, BY_NAME, FLOAT16, FLOAT32, FLOAT64, INT64, DType
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Shape, Tensor, contiguous_strides, whole

SLOW_STORAGE = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(path: Path, data: bytes, dtype: DType, shape: Shape, *, before: int = 0) -> list[Fragment]:
    """Write a tensor after `before` other bytes, and return its description."""
    path.write_bytes(b"\xee" * before + data)
    return [Fragment(whole(shape), Extent.contiguous(str(path), before, dtype, shape))]


def difference(a: list[Fragment], b: list[Fragment], shape: Shape, *, cast: bool = False) -> Difference | None:
    with Reader() as reader:
        return compare(shape, a, b, reader, cast=cast)


def pair(tmp_path: Path, dtype: DType, shape: Shape, a: bytes, b: bytes) -> Difference | None:
    one = stored(tmp_path / "a", a, dtype, shape, before=3)
    return difference(one, stored(tmp_path / "b", b, dtype, shape, before=8), shape)


@dataclass(frozen=True)
class Cut:
    """Layout of a stored tensor: bytes per file, and fragments."""

    files: dict[str, bytes]
    fragments: list[Fragment]

    def write(self, folder: Path) -> list[Fragment]:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return [f._replace(extent=f.extent._replace(path=str(folder / f.extent.path))) for f in self.fragments]


def cut_flat(array: np.ndarray, dtype: DType, edges: list[int]) -> Cut:
    """Cut into flat ranges, with one file and rank for each."""
    flat, files, fragments = array.reshape(-1), {}, []
    for rank, (start, stop) in enumerate(pairwise(edges)):
        files[f"flat{rank}"] = bytes(rank) + flat[start:stop].tobytes()
        extent = Extent(f"flat{rank}", rank, dtype, (stop - start,), (1,))
        fragments.append(Fragment(FlatRange(start, stop), extent, rank))
    return Cut(files, fragments)


def cut_boxes(array: np.ndarray, dtype: DType, dim: int, edges: list[int], order: list[int]) -> Cut:
    """Cut into boxes along `dim`, each stored with permuted dims, all in one file."""
    fragments, data = [], bytearray(b"\x55" * 5)
    for rank, (start, stop) in enumerate(pairwise(edges)):
        offsets = tuple(start if d == dim else 0 for d in range(array.ndim))
        sizes = tuple(stop - start if d == dim else n for d, n in enumerate(array.shape))
        part = array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].transpose(order)
        steps = contiguous_strides(part.shape)
        strides = tuple(steps[order.index(d)] for d in range(array.ndim))
        fragments.append(Fragment(Box(offsets, sizes), Extent("boxes", len(data), dtype, sizes, strides), rank))
        data += part.tobytes()
    return Cut({"boxes": bytes(data)}, fragments)


def view_of_rows(array: np.ndarray, dtype: DType, gap: int) -> Cut:
    """Lay out rows with a gap after each, like a slice of a wider matrix."""
    rows = array.reshape(-1, array.shape[-1])
    data = b"".join(row.tobytes() + b"\x99" * (gap * dtype.itemsize) for row in rows)
    strides = tuple(s // array.shape[-1] * (array.shape[-1] + gap) for s in contiguous_strides(array.shape)[:-1])
    extent = Extent("rows", 0, dtype, array.shape, (*strides, 1))
    return Cut({"rows": data}, [Fragment(whole(array.shape), extent, 7)])


def edges_of(draw: st.DrawFn, stop: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, stop), max_size=4))
    return [0, *sorted(inner), stop]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray, DType]:
    dtype = draw(st.sampled_from(ALL))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    raw = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(prod(shape) * dtype.itemsize)
    return np.frombuffer(raw, np.dtype(f"V{dtype.itemsize}")).reshape(shape), dtype


@st.composite
def cuts(draw: st.DrawFn, array: np.ndarray, dtype: DType) -> Cut:
    kind = draw(st.sampled_from(["flat", "boxes", "rows"]))
    if kind == "flat":
        return cut_flat(array, dtype, edges_of(draw, array.size))
    if kind == "rows":
        return view_of_rows(array, dtype, draw(st.integers(0, 3)))
    dim = draw(st.integers(0, array.ndim - 1))
    order = draw(st.permutations(range(array.ndim)))
    return cut_boxes(array, dtype, dim, edges_of(draw, array.shape[dim]), list(order))


def flip(array: np.ndarray, position: int, bit: int) -> np.ndarray:
    raw = bytearray(array.tobytes())
    raw[position * array.itemsize + bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


@SLOW_STORAGE
@given(data=st.data())
def test_a_flipped_bit_is_found_at_its_index_however_the_two_sides_are_cut(tmp_path: Path, data: st.DataObject) -> None:
    array, dtype = data.draw(arrays())
    one = data.draw(cuts(array, dtype)).write(tmp_path / "a")
    same = data.draw(cuts(array, dtype)).write(tmp_path / "b")
    assert difference(one, same, array.shape) is None

    position = data.draw(st.integers(0, array.size - 1))
    flipped = flip(array, position, data.draw(st.integers(0, 8 * dtype.itemsize - 1)))
    other = data.draw(cuts(flipped, dtype)).write(tmp_path / "c")
    found = difference(one, other, array.shape)

    assert found is not None, "no error found: the checker is broken"
    index = np.unravel_index(position, array.shape)
    assert (found.num_different, found.numel, found.index) == (1, array.size, tuple(map(int, index)))
    assert bytes.fromhex(found.a.bits)[::-1] == array[index].tobytes()
    assert bytes.fromhex(found.b.bits)[::-1] == flipped[index].tobytes()
    for element, expected in ((found.a, array[index]), (found.b, flipped[index])):
        with Path(element.path).open("rb") as file:
            file.seek(element.offset)
            assert file.read(dtype.itemsize) == expected.tobytes()


@SLOW_STORAGE
@given(data=st.data())
def test_of_several_differences_the_least_index_is_named_and_all_are_counted(
    tmp_path: Path, data: st.DataObject
) -> None:
    array, dtype = data.draw(arrays())
    positions = data.draw(st.sets(st.integers(0, array.size - 1), min_size=1))
    flipped = array
    for position in positions:
        flipped = flip(flipped, position, 0)
    found = difference(
        data.draw(cuts(array, dtype)).write(tmp_path / "a"),
        data.draw(cuts(flipped, dtype)).write(tmp_path / "b"),
        array.shape,
    )
    assert found is not None, "no error found: the checker is broken"
    assert found.num_different == len(positions)
    assert found.index == tuple(map(int, np.unravel_index(min(positions), array.shape)))


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the buffers, so that small tensors take the same paths as large ones."""
    monkeypatch.setattr(compare_module, "_CHUNK", 64)
    monkeypatch.setattr(compare_module, "_READ_COSTS", 16)


@pytest.mark.usefixtures("small_buffers")
class TestSmallBuffers:
    test_flip = staticmethod(test_a_flipped_bit_is_found_at_its_index_however_the_two_sides_are_cut)
    test_several = staticmethod(test_of_several_differences_the_least_index_is_named_and_all_are_counted)


def test_the_rank_and_file_of_the_first_difference_are_named(tmp_path: Path) -> None:
    array = np.arange(12, dtype="<i8").reshape(3, 4)
    other = array.copy()
    other[1, 2] += 5
    other[2, 0] = -(2**60)
    a = cut_flat(array, INT64, [0, 5, 12]).write(tmp_path / "a")
    b = cut_boxes(other, INT64, 1, [0, 2, 4], [0, 1]).write(tmp_path / "b")
    found = difference(a, b, (3, 4))
    assert found is not None
    assert (found.index, found.num_different, found.largest) == ((1, 2), 2, 2**60 + 8)
    assert (found.a.value, found.a.rank, Path(found.a.path).name) == (6, 1, "flat1")
    assert (found.b.value, found.b.rank, Path(found.b.path).name) == (11, 1, "boxes")
    assert str(found) == f"2 of 12 elements differ, first [1, 2]: 6 and 11; largest difference {2**60 + 8}"


NAN, OTHER_NAN = struct.pack("<I", 0x7FC00000), struct.pack("<I", 0x7FC00001)


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (NAN, OTHER_NAN, ("nan (0x7fc00000)", "nan (0x7fc00001)")),
        (NAN, struct.pack("<I", 0xFFC00000), ("nan (0x7fc00000)", "nan (0xffc00000)")),
        (struct.pack("<f", 0.0), struct.pack("<f", -0.0), ("0.0", "-0.0")),
        (struct.pack("<I", 1), struct.pack("<I", 0), ("1.401298464324817e-45", "0.0")),
        (struct.pack("<I", 0x7F800001), OTHER_NAN, ("nan (0x7f800001)", "nan (0x7fc00001)")),
    ],
)
def test_bits_decide_and_not_numbers(tmp_path: Path, a: bytes, b: bytes, shown: tuple[str, str]) -> None:
    found = pair(tmp_path, FLOAT32, (2,), NAN + a, NAN + b)
    assert found is not None, "no error found: the checker is broken"
    assert (found.index, str(found.a), str(found.b)) == ((1,), *shown)
    assert pair(tmp_path, FLOAT32, (2,), NAN + a, NAN + a) is None


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest", "num_nan"),
    [
        (FLOAT32, struct.pack("<3f", 1, 2, 3), struct.pack("<3f", 1, 2.5, 2), 1.0, 0),
        (FLOAT32, struct.pack("<3f", 1, 2, 3), struct.pack("<3f", 1, float("nan"), 2), 1.0, 1),
        (FLOAT32, struct.pack("<f", 1), struct.pack("<f", float("nan")), None, 1),
        (FLOAT32, struct.pack("<f", 1), struct.pack("<f", float("inf")), float("inf"), 0),
        (FLOAT32, struct.pack("<f", 0.0), struct.pack("<f", -0.0), 0.0, 0),
        (FLOAT64, struct.pack("<d", -1e308), struct.pack("<d", 1e308), float("inf"), 0),
        (FLOAT16, struct.pack("<e", 1), struct.pack("<e", 1.5), 0.5, 0),
        (BFLOAT16, b"\x80\x3f", b"\xc0\x3f", 0.5, 0),
        (BFLOAT16, b"\x80\x3f", b"\xc0\x7f", None, 1),
        (BOOL, b"\0", b"\1", 1, 0),
        (INT64, struct.pack("<q", -(2**63)), struct.pack("<q", 2**63 - 1), 2**64 - 1, 0),
        (BY_NAME["uint64"], struct.pack("<Q", 0), struct.pack("<Q", 2**64 - 1), 2**64 - 1, 0),
        (INT64, struct.pack("<3q", 1, 2, 3), struct.pack("<3q", 9, 2, 2), 8, 0),
        (BY_NAME["int8"], b"\x80", b"\x7f", 255, 0),
        (BY_NAME["uint16"], b"\0\0", b"\xff\xff", 65535, 0),
        (BY_NAME["complex64"], struct.pack("<2f", 0, 0), struct.pack("<2f", 3, 4), 5.0, 0),
        (BY_NAME["complex128"], struct.pack("<2d", 0, 0), struct.pack("<2d", 3, 4), 5.0, 0),
        (BY_NAME["float8_e4m3fn"], b"\x01", b"\x02", None, 0),
    ],
)
def test_the_largest_difference(
    tmp_path: Path, dtype: DType, a: bytes, b: bytes, largest: float | None, num_nan: int
) -> None:
    found = pair(tmp_path, dtype, (len(a) // dtype.itemsize,), a, b)
    assert found is not None, "no error found: the checker is broken"
    assert (found.largest, found.num_nan) == (largest, num_nan)
    assert type(found.largest) is type(largest)


def test_a_dtype_without_numbers_shows_its_bits(tmp_path: Path) -> None:
    found = pair(tmp_path, BY_NAME["float4_e2m1fn_x2"], (3,), b"\x01\x02\x03", b"\x01\x1f\x03")
    assert found is not None
    assert (found.index, found.a.value, str(found.a), str(found.b)) == ((1,), None, "0x02", "0x1f")


def test_a_0d_tensor_has_the_empty_index(tmp_path: Path) -> None:
    found = pair(tmp_path, FLOAT32, (), struct.pack("<f", 1), struct.pack("<f", 2))
    assert found is not None
    assert (found.index, found.numel, found.largest) == ((), 1, 1.0)
    assert pair(tmp_path, FLOAT32, (), NAN, NAN) is None


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_an_empty_tensor_is_equal_to_itself_without_fragments_too(tmp_path: Path, shape: Shape) -> None:
    one = stored(tmp_path / "a", b"", FLOAT32, shape)
    assert difference(one, one, shape) is None
    assert difference(one, [], shape) is None


def test_every_position_of_a_long_tensor_is_looked_at(tmp_path: Path) -> None:
    """The last byte, the bytes at the buffers' edges, and the tail after the last whole word."""
    numel = (2 << 20) + 13
    data = np.random.default_rng(0).integers(0, 256, numel, np.uint8)
    one = stored(tmp_path / "a", data.tobytes(), BY_NAME["uint8"], (numel,), before=1)
    for position in (0, 7, (1 << 20) - 1, 1 << 20, (2 << 20) - 1, 2 << 20, numel - 5, numel - 1):
        flipped = data.copy()
        flipped[position] ^= 0x10
        found = difference(one, stored(tmp_path / "b", flipped.tobytes(), BY_NAME["uint8"], (numel,)), (numel,))
        assert found is not None, "no error found: the checker is broken"
        assert (found.index, found.num_different, found.b.offset) == ((position,), 1, position)


@pytest.mark.parametrize("shape", [(700, 900), (3, 500, 400)])
def test_a_transposed_side_larger_than_the_buffers(tmp_path: Path, shape: Shape) -> None:
    array = np.random.default_rng(1).integers(0, 2**32, shape, np.uint32)
    a = cut_flat(array, FLOAT32, [0, 1234, array.size]).write(tmp_path / "a")
    order = list(range(len(shape)))[::-1]
    b = cut_boxes(array, FLOAT32, 0, [0, 2, shape[0]], order).write(tmp_path / "b")
    assert difference(a, b, shape) is None
    index = tuple(n - 2 for n in shape)
    array = array.copy()
    array[index] ^= 1
    found = difference(a, cut_boxes(array, FLOAT32, 0, [0, 2, shape[0]], order).write(tmp_path / "c"), shape)
    assert found is not None, "no error found: the checker is broken"
    assert (found.index, found.num_different) == (index, 1)


def test_an_expanded_tensor_is_read_again_for_every_row(tmp_path: Path) -> None:
    (tmp_path / "row").write_bytes(struct.pack("<3f", 1, 2, 3))
    expanded = [Fragment(whole((4, 3)), Extent(str(tmp_path / "row"), 0, FLOAT32, (4, 3), (0, 1)))]
    full = stored(tmp_path / "full", struct.pack("<3f", 1, 2, 3) * 4, FLOAT32, (4, 3))
    assert difference(expanded, full, (4, 3)) is None
    other = stored(tmp_path / "other", struct.pack("<12f", *[1, 2, 3] * 3, 1, 9, 3), FLOAT32, (4, 3))
    found = difference(expanded, other, (4, 3))
    assert found is not None
    assert (found.index, found.num_different) == ((3, 1), 1)


@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize(
    ("wide", "narrow"), [(FLOAT32, BFLOAT16), (FLOAT32, FLOAT16), (FLOAT64, FLOAT32), (FLOAT64, BFLOAT16)]
)
def test_a_cast_rounds_the_wider_side(tmp_path: Path, wide: DType, narrow: DType, wide_first: bool) -> None:
    values = np.random.default_rng(2).normal(size=300_000).astype(f"<f{wide.itemsize}")
    rounded = cast_bits(values.view(f"<u{wide.itemsize}"), wide, narrow)
    shape = (300, 1000)
    one = stored(tmp_path / "wide", values.tobytes(), wide, shape)
    sides = [one, stored(tmp_path / "narrow", rounded.tobytes(), narrow, shape)]
    first, second = sides if wide_first else sides[::-1]
    assert difference(first, second, shape, cast=True) is None

    rounded[123_456] ^= 1
    sides[1] = stored(tmp_path / "narrow", rounded.tobytes(), narrow, shape)
    first, second = sides if wide_first else sides[::-1]
    found = difference(first, second, shape, cast=True)
    assert found is not None, "no error found: the checker is broken"
    assert (found.index, found.num_different) == ((123, 456), 1)
    on_wide = found.a if wide_first else found.b
    assert on_wide.offset == 123_456 * wide.itemsize
    assert len(on_wide.bits) == 2 * narrow.itemsize


def test_a_cast_of_a_transposed_side(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(40, 50)).astype("<f4")
    a = cut_boxes(values, FLOAT32, 0, [0, 40], [1, 0]).write(tmp_path / "a")
    rounded = cast_bits(values.reshape(-1).view("<u4"), FLOAT32, BFLOAT16)
    assert difference(a, stored(tmp_path / "b", rounded.tobytes(), BFLOAT16, (40, 50)), (40, 50), cast=True) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (FLOAT32, BFLOAT16, BFLOAT16),
        (FLOAT16, FLOAT64, FLOAT16),
        (FLOAT16, BFLOAT16, None),
        (INT64, FLOAT32, None),
        (INT64, INT64, INT64),
        (FLOAT32, BY_NAME["float8_e5m2"], None),
    ],
)
def test_which_dtype_two_sides_are_cast_to(a: DType, b: DType, expected: DType | None) -> None:
    assert narrower(a, b) == expected
    assert narrower(b, a) == expected


def test_two_dtypes_are_refused_without_a_cast(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", bytes(8), FLOAT32, (2,))
    b = stored(tmp_path / "b", bytes(4), BFLOAT16, (2,))
    with pytest.raises(CorruptError, match="different dtypes"):
        difference(a, b, (2,))


def test_a_hole_is_never_equal(tmp_path: Path) -> None:
    full = stored(tmp_path / "a", bytes(32), FLOAT32, (8,))
    part = [Fragment(FlatRange(0, 5), full[0].extent.flat(0, 5)), Fragment(FlatRange(6, 8), full[0].extent.flat(6, 8))]
    with pytest.raises(CorruptError, match="do not cover") as caught:
        difference(full, part, (8,))
    assert "7 elements" in str(caught.value)


def test_a_file_that_ends_too_early_is_named_with_the_place(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", bytes(32), FLOAT32, (8,))
    b = stored(tmp_path / "b", bytes(30), FLOAT32, (8,))
    with pytest.raises(CorruptError, match="ends inside a tensor") as caught:
        difference(a, b, (8,))
    assert caught.value.path == str(tmp_path / "b")
    assert "byte 30" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", bytes(32), FLOAT32, (8,))
    (tmp_path / "a").unlink()
    with pytest.raises(NotFoundError) as caught:
        difference(a, a, (8,))
    assert caught.value.path == str(tmp_path / "a")


def test_more_files_than_a_reader_keeps_open(tmp_path: Path) -> None:
    array = np.arange(200, dtype="<i8")
    a = cut_flat(array, INT64, list(range(201))).write(tmp_path / "a")
    b = cut_flat(array, INT64, [0, 200]).write(tmp_path / "b")
    with Reader() as reader:
        for _ in range(2):
            assert compare((200,), a, b, reader) is None
        assert len(reader._files._open) <= files._OPEN_FILES
    assert not reader._files._open


def test_bytes_read_are_reported(tmp_path: Path) -> None:
    array = np.random.default_rng(4).integers(0, 255, (1000, 700), np.uint32)
    a = cut_flat(array, FLOAT32, list(accumulate([0, 1, 1000, 698_999]))).write(tmp_path / "a")
    for number, order in enumerate(([0, 1], [1, 0])):
        seen: list[int] = []
        b = cut_boxes(array, FLOAT32, 1, [0, 300, 700], order).write(tmp_path / str(number))
        with Reader(seen.append) as reader:
            assert compare(array.shape, a, b, reader) is None
        assert sum(seen) == array.nbytes


def replicated(tmp_path: Path, second: bytes, ranks: tuple[int | None, int | None] = (0, 1)) -> Tensor:
    shape = (2, 3)
    a = stored(tmp_path / "rank0", struct.pack("<6f", *range(6)), FLOAT32, shape)
    b = stored(tmp_path / "rank1", second, FLOAT32, shape)
    (one,), (other,) = a, b
    source, replica = Pieces((one._replace(rank=ranks[0]),)), Pieces((other._replace(rank=ranks[1]),))
    return Tensor("norm.weight", "weight", FLOAT32, shape, source, replicas=(replica,))


def test_replicas_that_agree(tmp_path: Path) -> None:
    read: list[int] = []
    with Reader(read.append) as reader:
        check_replicas(replicated(tmp_path, struct.pack("<6f", *range(6))), reader)
    assert sum(read) == 24  # all bytes were compared


def test_replicas_that_disagree_are_named_with_the_first_element(tmp_path: Path) -> None:
    tensor = replicated(tmp_path, struct.pack("<6f", 0, 1, 2, 3, -4, 6))
    with Reader() as reader, pytest.raises(CorruptError) as caught:
        check_replicas(tensor, reader)
    error = caught.value
    assert (error.fqn, error.rank, error.path) == ("norm.weight", 1, str(tmp_path / "rank1"))
    assert "element [1, 1] at byte 16 is -4.0 instead of 4.0" in str(error)
    assert "2 differ" in str(error)


def test_copies_that_no_rank_holds_are_not_called_ranks(tmp_path: Path) -> None:
    """A tied model's file may hold both tensors, and no rank can be named."""
    tensor = replicated(tmp_path, bytes(24), ranks=(None, None))
    with Reader() as reader, pytest.raises(CorruptError, match="copies disagree for one tensor") as caught:
        check_replicas(tensor, reader)
    assert "None" not in str(caught.value) and "--replica" not in str(caught.value)


def test_a_replica_with_a_hole_is_refused(tmp_path: Path) -> None:
    tensor = replicated(tmp_path, bytes(24))
    (fragment,) = tensor.replicas[0].fragments(tensor.shape)
    part = Fragment(Box((0, 0), (1, 3)), fragment.extent.narrow(Box((0, 0), (1, 3))), 1)
    with Reader() as reader, pytest.raises(CorruptError, match="stored nowhere"):
        check_replicas(tensor._replace(replicas=(Pieces((part,)),)), reader)
