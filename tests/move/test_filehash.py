"""`ckpt/move/file_pieces.py`: a piece's digest is the digest of its bytes, however they are read."""

from __future__ import annotations

import os
import tempfile
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from ckpt.errors import CorruptError
from ckpt.move import file_pieces
from ckpt.move.file_pieces import Hasher, Piece


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Draw ranges in order, with gaps or without, some empty."""
    numbers = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=20))
    ends = accumulate(gap + size for gap, size in numbers)
    return list(dict.fromkeys((end - size, size) for end, (_, size) in zip(ends, numbers, strict=True)))


class TestHasher:
    @given(pieces(), st.sampled_from([1, 7, 64, 1 << 20]), st.integers(0, 50))
    def test_pieces_and_rest_are_hashed_as_they_are_whatever_is_read_together(
        self, ranges: list[Piece], chunk: int, gap: int
    ) -> None:
        content = os.urandom(sum(ranges[-1] if ranges else (0, 0)) + 30)
        rest, reached, told = xxh3_128(), 0, 0

        def advance(count: int) -> None:
            nonlocal told
            told += count

        with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_pieces, "GAP", gap)
            file.write(content)
            file.flush()
            hasher = Hasher(chunk, advance)
            assert hasher.pieces(file.fileno(), "a", ranges) == {
                (at, size): xxh3_128(content[at : at + size]).hexdigest() for at, size in ranges
            }
            assert told == sum(size for _, size in ranges)
            for at, size in ranges:
                rest.update(content[reached:at])
                reached = at + size
            rest.update(content[reached:])
            assert hasher.rest(file.fileno(), "a", len(content), ranges) == rest.hexdigest()

    def test_many_small_pieces_take_few_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = []
        read = file_pieces.read_into
        monkeypatch.setattr(file_pieces, "read_into", lambda *args: reads.append(args) or read(*args))
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 20))
            file.flush()
            Hasher().pieces(file.fileno(), "a", [(start, 1000) for start in range(0, 1 << 20, 1024)])
        assert len(reads) == 1

    def test_a_file_that_ends_early_is_an_error(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(100))
            file.flush()
            with pytest.raises(CorruptError, match="ends while it is being read"):
                Hasher().pieces(file.fileno(), "a", [(0, 50), (60, 50)])
