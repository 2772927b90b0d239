"""Check that a run's file is complete, from its name, size and headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt.containers.safetensors import read_header
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.weights import MAX_INDEX
from ckpt.move.files import confined, is_broken_link
from ckpt.move.json_files import MAX_JSON, parse_json
from ckpt.move.source import read_file
from ckpt.runs.file_table import TORCH_SUFFIXES

ZIP = b"PK\x03\x04"

#: Contradictory zip archives, and links that leave the folder.
_ALWAYS_DAMAGE = (torchfile.NOT_READ, "symlink")


def check_file(path: Path, root: Path) -> Any:
    """Return the content of a JSON file. Raise CorruptError if a file is incomplete, by its name and its first bytes.

    Raise NotFoundError or UnsafeError for a pickle that is not read, UnsafeError for a link out of `root`, and
    IncompleteError for a broken link.
    """
    is_broken = is_broken_link(path)
    is_torch = not is_broken and is_torch_file(path)
    if path != root and (is_broken or is_torch or path.suffix in (".safetensors", ".json")):
        confined(root, str(path.relative_to(root)))
    if path.suffix == ".safetensors":
        read_header(path)
    elif path.suffix == ".json":
        limit = MAX_INDEX if path.name.endswith(".index.json") else MAX_JSON
        content = read_file(path, limit + 1)
        if not content:
            raise IncompleteError("the file is empty", path=path, expected="JSON")
        return parse_json(content, path, max_bytes=limit)
    elif is_torch:
        torchfile.read(path)
    return None


def has_checked_suffix(path: Path) -> bool:
    return path.name.endswith((*TORCH_SUFFIXES, ".pkl", ".safetensors", ".json"))


def is_torch_file(path: Path) -> bool:
    """Return True for torch's file suffixes, and for `.pkl` if torch.save wrote it or it is empty."""
    if path.suffix != ".pkl":
        return path.name.endswith(TORCH_SUFFIXES)
    head = read_file(path, 4)
    return head == ZIP or not head.strip(b"\0")


def is_unread(error: CkptError, path: Path) -> bool:
    """Return True if `check_file` found no fault but did not read the file."""
    if any(words in error.what for words in _ALWAYS_DAMAGE):
        return False
    return isinstance(error, NotFoundError | UnsafeError) and is_torch_file(path)


def check_carried(path: Path, root: Path) -> None:
    """Raise CorruptError for damage that `ckpt check` reports."""
    try:
        check_file(path, root)
    except CkptError as error:
        if not is_unread(error, path):
            raise


def check_copied(path: Path, root: Path) -> None:
    """Raise CorruptError, with a way to convert without the file, if it is incomplete."""
    try:
        check_carried(path, root)
    except CorruptError as error:
        error.hint = error.hint or f"to convert without {path.name}, move it out of {path.parent}"
        raise


def carried_content(path: Path, root: Path) -> bytes:
    """Raise CorruptError if the file is incomplete."""
    check_copied(path, root)
    return read_file(path)
