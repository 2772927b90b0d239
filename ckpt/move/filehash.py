"""File digests by piece, to show where a file has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128

from ckpt.base.errors import CorruptError
from ckpt.move.files import translate_os_errors
from ckpt.move.source import GAP, read_into
from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.spans import Piece

CHUNK = 1 << 20  # fits the processor's cache
_JOB = 32 << 20  # bytes of small pieces in one batch
_MAX_PIECES = 4096  # per file and for all files
_MAX_PIECES_TOGETHER = 1_000_000


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's size in bytes, each piece's xxh3-128, and the digest of the other bytes in order."""

    size: int
    pieces: dict[Piece, str]
    rest: str


def max_pieces(num_files: int) -> int:
    return max(1, min(_MAX_PIECES, _MAX_PIECES_TOGETHER // max(1, num_files)))


def pieces_of(file: TargetFile, at_most: int) -> list[Piece]:
    """Return a target file's pieces: one per slot, merged if slots interleave or are more than `at_most`."""
    spans = sorted((slot.extent.offset, slot.extent.end) for slot in file.slots if slot.extent.numel)
    least = file.size // at_most if len(spans) > at_most else 0
    pieces: list[Piece] = []
    start = stop = 0
    for low, high in spans:
        if pieces and (low < stop or stop - start < least):
            pieces.pop()
            stop = max(stop, high)
        else:
            start, stop = low, high
        pieces.append((start, stop - start))
    return pieces


def digest_of_bytes(content: bytes) -> FileDigest:
    return FileDigest(len(content), {}, xxh3_128(content).hexdigest())


def jobs(pieces: Iterable[Piece]) -> Iterator[list[Piece] | None]:
    """Yield hashing jobs for several threads: lists of pieces, or None for the file's other bytes."""
    job: list[Piece] = []
    size = 0
    for piece in pieces:
        job.append(piece)
        size += piece[1]
        if size >= _JOB:
            yield job
            job, size = [], 0
    if job:
        yield job
    yield None


class Hasher:
    """Hasher for one thread. `advance` gets the number of bytes read."""

    def __init__(self, chunk: int = CHUNK, advance: Callable[[int], None] = lambda _: None) -> None:
        self._buffer = memoryview(bytearray(chunk))
        self._advance = advance

    def pieces(self, descriptor: int, path: str, pieces: Iterable[Piece]) -> dict[Piece, str]:
        hashers = {piece: xxh3_128() for piece in pieces}
        for piece, part in self._parts(descriptor, path, [*hashers]):
            hashers[piece].update(part)
        return {piece: hasher.hexdigest() for piece, hasher in hashers.items()}

    def rest(self, descriptor: int, path: str, size: int, pieces: Iterable[Piece]) -> str:
        """Return the digest of all bytes outside `pieces` (sorted)."""
        hasher = xxh3_128()
        for _, part in self._parts(descriptor, path, [*between(size, pieces)]):
            hasher.update(part)
        return hasher.hexdigest()

    def _parts(self, descriptor: int, path: str, ranges: Sequence[Piece]) -> Iterator[tuple[Piece, memoryview]]:
        """Yield each range's bytes in parts, in order. Ranges close together share a read."""
        start = end = 0  # range in the buffer
        for number, piece in enumerate(ranges):
            offset, stop = piece[0], sum(piece)
            while offset < stop:
                if not start <= offset < end:
                    reach = min(stop, offset + len(self._buffer))
                    for low, length in map(ranges.__getitem__, range(number + 1, len(ranges))):
                        if not reach <= low <= reach + GAP or low + length > offset + len(self._buffer):
                            break
                        reach = low + length
                    with translate_os_errors(path):
                        count = read_into(descriptor, offset, self._buffer[: reach - offset])
                    if not count:
                        raise CorruptError("the file ends while it is being read", path=path, found=f"at byte {offset}")
                    start, end = offset, offset + count
                part = self._buffer[offset - start : min(stop, end) - start]
                yield piece, part
                self._advance(len(part))
                offset += len(part)


def between(size: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the ranges outside `pieces` (sorted)."""
    end = 0
    for offset, length in (*pieces, (size, 0)):
        if offset > end:
            yield end, offset - end
        end = offset + length
