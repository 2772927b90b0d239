"""Small JSON files with limits on size, number of values and depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError
from ckpt.base.text import pluralize, show_size
from ckpt.move.source import read_file

MAX_JSON = 256 << 20
MAX_JSON_ITEMS = 5_000_000
MAX_JSON_DEPTH = 100


def read_json(path: Path, *, unique: bool = False, max_bytes: int = MAX_JSON) -> Any:
    """Return the JSON in a small file.

    Raise CorruptError if it is too large, has too many values, is nested too deeply, or (if `unique`) repeats a name.
    """
    return parse_json(read_file(path, max_bytes + 1), path, unique=unique, max_bytes=max_bytes)


def parse_json(content: bytes, path: Path, *, unique: bool = False, max_bytes: int = MAX_JSON) -> Any:
    if len(content) > max_bytes:
        raise CorruptError("the JSON file is too large", path=path, expected=f"at most {show_size(max_bytes)}")
    if content.count(b",") + content.count(b"[") + content.count(b"{") > MAX_JSON_ITEMS:
        raise CorruptError("the JSON file has too many values", path=path, expected=f"at most {MAX_JSON_ITEMS}")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if unique and len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            raise CorruptError("a name appears twice in the JSON file", path=path, found=repr(twice))
        return found

    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=members)
    except (ValueError, RecursionError) as error:
        ends = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        )
        if ends:
            raise IncompleteError("the JSON file ends too early", path=path, found=str(error)) from None
        raise CorruptError("the file is not JSON", path=path, found=str(error)) from None
    if content.count(b"[") + content.count(b"{") > MAX_JSON_DEPTH and _is_deep(found):
        raise CorruptError(
            "the JSON file is nested too deeply", path=path, expected=f"at most {pluralize(MAX_JSON_DEPTH, 'level')}"
        )
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, dict | list) for one in level)


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Raise CorruptError, with `what`, if the file holds another type."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise CorruptError(f"{what} is not a JSON object", path=path, found=type(found).__name__)
    return found
