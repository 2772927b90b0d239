"""Journal of a conversion: each file's written pieces with their digests, one per line.

A later run reads every piece again and compares the digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from ckpt.base.errors import CorruptError, UsageError, shown
from ckpt.base.text import one_line, show_size
from ckpt.base.version import __version__
from ckpt.base.words import Message
from ckpt.move.file_pieces import CHUNK, Hasher, Pieces
from ckpt.move.files import OpenFiles, disk_bytes, translate_os_errors
from ckpt.move.source import is_standin, open_stream
from ckpt.move.threads import in_threads
from ckpt.plan.checkpoint import Key, SourceFile
from ckpt.plan.planner import Plan
from ckpt.plan.spans import Piece

JOURNAL = ".ckpt-journal"
_LARGEST = 1 << 30  # bytes
_BEGINS_ANEW = Message("use {restart=True} to discard it and start over")

#: By target file name.
Digests = dict[str, dict[Piece, str]]


def header(plan: Plan) -> dict[str, Any]:
    """Return the facts that must match to continue a conversion."""
    return {"version": __version__, "plan": _digest(plan), "sources": [_facts(file) for file in plan.sources]}


def _facts(file: SourceFile) -> list[Any]:
    """Leave out a stand-in's inode: each process has another one. Its time identifies the version."""
    if is_standin(file.path):
        return list(astuple(SourceFile(shown(file.path), file.size, file.mtime_ns, 0)))
    return list(astuple(replace(file, path=os.path.abspath(file.path))))  # a later run may start in another folder


def _digest(plan: Plan) -> str:
    """Cover all bytes written by the plan itself, and all source places."""
    hasher = xxh3_128()
    keys: dict[Key, None] = {}

    def add(*values: object) -> None:
        hasher.update(shown(repr(values)).encode("utf-8", "surrogatepass"))

    add(plan.checkpoint.config)
    for file in plan.target.files:
        add(file.name, file.size, file.zeros, file.literals)
        for spans in plan.spans(file):
            add(spans.source_dtype, spans.target_dtype, spans.paths, len(spans))
            for column in (spans.path, spans.source, spans.target, spans.numel):
                hasher.update(column.data)
        for slot in plan.slots(file):
            add(*slot)
            keys[slot.key] = None
    for key in keys:
        add(key, *plan.checkpoint.tensors[key].fragments())
    return hasher.hexdigest()


class Journal:
    """Record of the pieces written by process `rank`. Threads may call `add` in parallel.

    It starts with the pieces already `done`, and replaces an older journal atomically.
    """

    def __init__(self, folder: Path, begin: Mapping[str, Any], done: Digests, rank: int = 0) -> None:
        self._path = _place(folder, rank)
        self._lock = threading.Lock()
        lines = [{**begin, "command": _command()}, *(line for name in done for line in _recorded(name, done[name]))]
        staged = self._path.with_name(f"{self._path.name}.new")  # read as a journal too
        with translate_os_errors(staged):
            staged.unlink(missing_ok=True)
            with open(staged, "xb") as file:
                file.write(_text(lines))
            os.replace(staged, self._path)

    def add(self, name: str, digests: Mapping[Piece, str]) -> None:
        # Opened each time, so that other nodes see it (NFS). Never created here: the folder may have changed owner.
        with self._lock, translate_os_errors(self._path), FileIO(self._path, "a", opener=_open_existing) as file:
            file.write(_text(_recorded(name, digests)))


def _recorded(name: str, digests: Mapping[Piece, str]) -> Iterator[list[Any]]:
    return ([name, *piece, digest] for piece, digest in digests.items())


def _text(lines: Iterable[Any]) -> bytes:
    """Begin with a newline: the line before may be truncated."""
    return ("".join(f"\n{json.dumps(line)}" for line in lines) + "\n").encode()


def _command() -> str:
    program, *words = sys.argv or [""]
    path = Path(program)
    return shown(shlex.join([path.parent.name if path.name == "__main__.py" else path.name, *words]))


@contextlib.contextmanager
def without_journals(folder: Path, size: int) -> Iterator[None]:
    """Remove the journals from a complete conversion. Restore them if it is not moved."""
    before, journals = os.stat(folder), {}
    try:
        for path in (_place(folder, rank) for rank in range(size)):
            with translate_os_errors(path):
                journals[path] = path.read_bytes()
                path.unlink()
        yield
    except BaseException:
        if folder.exists() and os.path.samestat(before, os.stat(folder)):
            with contextlib.suppress(OSError):  # the original error matters more
                for path, content in journals.items():
                    path.write_bytes(content)
        raise


def _place(folder: Path, rank: int) -> Path:
    return folder / (f"{JOURNAL}.{rank}" if rank else JOURNAL)


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def read_journals(folder: Path, expected: Mapping[str, Any]) -> Digests:
    """Return the digests recorded for the header `expected`.

    Raise CorruptError if a source file has changed or a journal is malformed, UsageError if it was a different
    conversion.
    """
    found: Digests = {}
    for path in sorted(folder.glob(f"{JOURNAL}*")):
        is_same = False  # the header may be lost
        for line in _lines(path):
            if isinstance(line, dict):
                _check_same(line, expected, path)
                is_same = True
            elif is_same and isinstance(line, list) and [type(value) for value in line] == [str, int, int, str]:
                name, offset, length, digest = line
                found.setdefault(name, {})[offset, length] = digest
    return found


def holds_pieces(folder: Path) -> bool:
    return any(isinstance(line, list) for path in folder.glob(f"{JOURNAL}*") for line in _lines(path))


def _leftovers(folder: Path) -> str:
    found = f"{show_size(disk_bytes(folder))}"
    with contextlib.suppress(CorruptError):
        for path in folder.glob(JOURNAL):
            written = datetime.fromtimestamp(path.lstat().st_mtime)
            found += f", last written {written:%Y-%m-%d %H:%M:%S}"
            begun = next((line for line in _lines(path) if isinstance(line, dict)), {})
            if isinstance(command := begun.get("command"), str):
                found += f", by `{one_line(command, 200)}`"
    return found


def sources_of(folder: Path) -> list[SourceFile]:
    """Return the source files of the conversion in `folder`. Raise CorruptError."""
    for path in sorted(folder.glob(f"{JOURNAL}*")):
        for line in _lines(path):
            if isinstance(line, dict) and "sources" in line:
                return _sources(line, path)
    return []


def _lines(path: Path) -> Iterator[Any]:
    """Yield the JSON values in complete lines. Raise CorruptError if the file is no journal."""
    try:
        with translate_os_errors(path):
            if path.is_symlink():
                raise CorruptError("this is not a regular file", path=path, found="a link")
            with open_stream(path) as file:
                if os.fstat(file.fileno()).st_size > _LARGEST:
                    raise CorruptError("the journal is too large", path=path, expected=f"at most {show_size(_LARGEST)}")
                for line in file:
                    try:
                        yield json.loads(line)
                    except ValueError:  # truncated or empty
                        continue
                    except RecursionError:
                        raise CorruptError("the journal is nested too deeply", path=path) from None
    except CorruptError as error:
        error.hint = error.hint or _BEGINS_ANEW
        raise


def _sources(begun: Mapping[str, Any], path: Path) -> list[SourceFile]:
    sources = begun.get("sources", [])
    kinds = [str, int, int, int, int]
    if not isinstance(sources, list) or not all(
        isinstance(facts, list) and [type(fact) for fact in facts] == kinds for facts in sources
    ):
        raise CorruptError("the journal's source list is damaged", path=path, hint=_BEGINS_ANEW)
    return [SourceFile(*facts) for facts in sources]


def _check_same(begun: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    if {name: begun.get(name) for name in expected} == expected:
        return
    version = begun.get("version")
    if version != expected["version"]:
        what = "the stopped conversion there is from another version of ckpt"
        found = version if isinstance(version, str) else "an older one"
        hint = Message("{}: {}", _BEGINS_ANEW, _leftovers(path.parent))
        raise UsageError(what, path=path.parent, expected=expected["version"], found=found, hint=hint)
    known = {file.path: file for file in _sources(begun, path)}
    files = _sources(expected, path)
    if known and files and not any(file.path in known for file in files):  # the run may have saved a newer step
        what = "the stopped conversion there has another source"
        hint = Message(
            "give that source again to continue ({tag=TAG} for a step); {}: {}", _BEGINS_ANEW, _leftovers(path.parent)
        )
        raise UsageError(what, path=path.parent, expected=next(iter(known)), found=files[0].path, hint=hint)
    for now in files:
        then = known.get(now.path, now)
        if then != now:
            what = "the source has changed since the stopped conversion"
            hint = Message("{}: {}", _BEGINS_ANEW, _leftovers(path.parent))
            raise CorruptError(what, path=now.path, expected=then.facts(), found=now.facts(), hint=hint)
    what = "the stopped conversion there has other options or another source"
    hint = Message("run the same command again to continue it; {}", _BEGINS_ANEW)
    raise UsageError(what, path=path.parent, found=_leftovers(path.parent), hint=hint)


def still_there(folder: Path, claimed: Digests, pieces: Pieces, memory: int) -> Digests:
    """Return the pieces with the claimed digests. All buffers together have `memory` bytes."""
    found: Digests = {}
    todo = [
        (name, wanted)
        for name, inside in pieces.items()
        if (wanted := [piece for piece in inside if piece in claimed.get(name, ())]) and (folder / name).is_file()
    ]

    def check(jobs: Iterator[tuple[str, list[Piece]]]) -> None:
        hasher = Hasher(min(CHUNK, memory // 8))
        with OpenFiles() as opened:
            for name, wanted in jobs:
                path = str(folder / name)
                descriptor = opened.descriptor(path)
                size = os.fstat(descriptor).st_size
                for piece in (piece for piece in wanted if sum(piece) <= size):
                    if hasher.pieces(descriptor, path, [piece])[piece] == claimed[name][piece]:
                        found.setdefault(name, {})[piece] = claimed[name][piece]

    in_threads(check, todo)
    return found
