"""Pieces of a SentencePiece model, `tokenizer.model`: text, score and type.

Format: protocol buffers (`sentencepiece_model.proto`). Field 1 of the model is a piece; its fields are text (1),
score (2) and type (3). Other fields are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.base.errors import CorruptError
from ckpt.move.source import read_file

FILE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Piece(NamedTuple):
    """A token, with the number of its type in SentencePiece and llama.cpp."""

    text: str
    score: float = 0.0
    type: int = NORMAL


def read_pieces(path: Path) -> list[Piece]:
    try:
        found = [_piece(value) for field, value in _fields(read_file(path)) if field == 1]
    except (IndexError, TypeError, ValueError, struct.error) as error:
        raise CorruptError("this is not a SentencePiece model", path=path, found=str(error)) from None
    if not found:
        raise CorruptError("the SentencePiece model has no pieces", path=path)
    return found


def _piece(message: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for field, value in _fields(message):
        if field == 1:
            text = bytes(value).decode()
        elif field == 2:
            (score,) = struct.unpack("<f", value)
        elif field == 3:
            kind = int(value)
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of a message's fields: a varint as a number, anything else as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"the file ends within a field, at byte {at}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"a number of more than 10 bytes, at byte {at}")
