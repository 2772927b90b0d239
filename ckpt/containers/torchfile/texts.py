"""Numbers and text in pickle opcodes."""

from __future__ import annotations

import codecs

from ckpt.base.text import pluralize
from ckpt.containers.torchfile.values import MAX_LONG, MalformedError


def decimal(line: bytes) -> int:
    if len(line) > MAX_LONG:
        raise MalformedError(f"an integer of {pluralize(len(line), 'digit')}")
    return int(line)


def decimal_or_bool(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else decimal(line)


def two_complement(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def quoted(line: bytes) -> str:
    """Decode a string from Python 2's protocol 0. Escapes are unsupported: no framework writes any."""
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
        raise MalformedError("a quoted string with more than plain text")
    return line[1:-1].decode("ascii")


def python2_text(data: bytes) -> str | bytes:
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        return data


def text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def escaped(line: bytes) -> str:
    # A lookup by name would import the codec.
    return codecs.raw_unicode_escape_decode(line)[0]
