"""Reader for uploads by hf_xet 1.8, after the protocol's public description and LZ4's frame format."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

_ENTRY = 48  # bytes in every shard record
_NONE, _LZ4, _GROUPED_LZ4 = range(3)
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30


def chunks(xorb: bytes) -> list[bytes]:
    """Return a xorb's chunks: each follows 8 bytes with version, stored size, compression and size."""
    found, at = [], 0
    while at < len(xorb):
        stored, compression = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4]
        size = int.from_bytes(xorb[at + 5 : at + 8], "little")
        data = xorb[at + 8 : at + 8 + stored]
        content = data if compression == _NONE else _lz4(data)
        found.append(_ungrouped(content) if compression == _GROUPED_LZ4 else content)
        assert xorb[at] == 0 and compression <= _GROUPED_LZ4 and len(found[-1]) == size
        at += 8 + stored
    return found


def files(shard: bytes, xorbs: Mapping[str, list[bytes]]) -> Iterator[bytes]:
    """Yield each file's content in a shard, assembled from chunks in `xorbs`."""
    at = _ENTRY  # behind the header
    while shard[at : at + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<2I", shard, at + 32)
        content = []
        for entry in range(at + _ENTRY, at + (1 + count) * _ENTRY, _ENTRY):
            size, start, stop = struct.unpack_from("<4I", shard, entry + 32)[1:]
            part = b"".join(xorbs[_hex(shard[entry : entry + 32])][start:stop])
            assert len(part) == size
            content.append(part)
        yield b"".join(content)
        at += (1 + count + count * bool(flags & _WITH_VERIFICATION) + bool(flags & _WITH_METADATA)) * _ENTRY


def _hex(name: bytes) -> str:
    """Return a hash in its address form: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", name))


def _ungrouped(data: bytes) -> bytes:
    """Undo the byte grouping: the data has the first bytes of all groups of four, then the second ones, and so on."""
    found, at = bytearray(len(data)), 0
    for number in range(4):
        size = len(range(number, len(data), 4))
        found[number::4] = data[at : at + size]
        at += size
    return bytes(found)


def _lz4(frame: bytes) -> bytes:
    assert frame[:4] == b"\x04\x22\x4d\x18" and frame[4] & 0b11001 == 0  # neither sizes nor checksums
    found, at = bytearray(), 7
    while size := int.from_bytes(frame[at : at + 4], "little"):
        length = size & 0x7FFFFFFF
        block = frame[at + 4 : at + 4 + length]
        found += block if size >> 31 else _lz4_block(block)
        at += 4 + length
    return bytes(found)


def _lz4_block(block: bytes) -> bytes:
    found, at = bytearray(), 0

    def more(length: int, at: int) -> tuple[int, int]:
        while length >= 15:
            length, at = length + block[at], at + 1
            if block[at - 1] != 255:
                break
        return length, at

    while at < len(block):
        token = block[at]
        length, at = more(token >> 4, at + 1)
        found += block[at : at + length]
        at += length
        if at >= len(block):
            break
        offset = int.from_bytes(block[at : at + 2], "little")
        length, at = more(token & 15, at + 2)
        for _ in range(length + 4):
            found.append(found[-offset])
    return bytes(found)
