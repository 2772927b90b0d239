"""`ckpt-manifest.json`: digests of a conversion's output.

It holds each file's size and xxh3-128 digests for its pieces: one for each tensor's bytes, and one for all other bytes
(headers, pickles, padding). A copied file is one piece. If every tensor is contiguous, like in safetensors, it also
holds the logical digests (`ckpt.compare.digest`). It has its own digest. The same conversion writes the same manifest.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from xxhash import xxh3_128

from ckpt.base.errors import CkptError, CorruptError, NotFoundError, printable, shown
from ckpt.base.results import Returned
from ckpt.base.text import pluralize
from ckpt.compare.digest import ALGORITHM, Progress, digests
from ckpt.move.file_pieces import FileDigest, Hasher, jobs
from ckpt.move.files import OpenFiles, confined, translate_os_errors
from ckpt.move.json_files import read_json
from ckpt.move.listing import listed_once
from ckpt.move.threads import in_threads
from ckpt.move.workers import FileDigests
from ckpt.plan import registry
from ckpt.plan.checkpoint import Checkpoint, Format, ReadRequest
from ckpt.plan.spans import Piece
from ckpt.plan.tensors import Tensor
from ckpt.runs.search import MANIFEST as MANIFEST

_VERSION = 2
_MAX_NAMES = 5  # tensor names per message
_MAX_COPY = 64 << 20  # always read


def make_manifest(
    folder: Path, format: Format, files: FileDigests, quantization: Mapping[str, str] | None = None
) -> bytes:
    """Return the manifest for a checkpoint in `folder`.

    `quantization` has the method and the rounding rule of weights that ckpt quantized.
    """
    with listed_once():
        found = format.find(folder, None)
        if found is None:
            raise CorruptError(f"the written files are not recognised as {format.name}", path=folder)
        checkpoint = format.read(found, ReadRequest())
    known = {
        (str(folder / name), *piece): bytes.fromhex(digest)
        for name, file in files.items()
        for piece, digest in file.pieces.items()
    }
    tensors = digests(checkpoint, known=known)
    content = {
        "version": _VERSION,
        "algorithm": ALGORITHM,
        "format": format.name,
        "names": checkpoint.namespace,
        **({"quantization": dict(quantization)} if quantization else {}),
        "digests": tensors.whole,
        "files": {
            name: {
                "bytes": file.size,
                "rest": file.rest,
                "pieces": [[*piece, sum] for piece, sum in file.pieces.items()],
            }
            for name, file in sorted(files.items())
        },
        "tensors": [tensor.to_json() for tensor in tensors.tensors],
    }
    return _dump(content | {"digest": own_digest(content)})


def _dump(content: dict[str, Any]) -> bytes:
    """Write one line per file and tensor."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(map(json.dumps, value))
            lines.append(f"{json.dumps(name)}: [\n  {inner}\n ]")
        elif isinstance(value, dict) and value:
            inner = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(member)}" for key, member in value.items())
            lines.append(f"{json.dumps(name)}: {{\n  {inner}\n }}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


def own_digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class ManifestCheck(Returned):
    """Outcome of a check: `problems` in files and tensors, and files missing in the manifest."""

    verdict: ClassVar[str] = ".good"

    path: str
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        return (
            f"<{shown(self.path)}: {'as its manifest says' if self.good else pluralize(len(self.problems), 'problem')}>"
        )

    @property
    def exit_code(self) -> int:
        return int(not self.good)

    def lines(self) -> Iterator[str]:
        yield from (f"* {printable(problem)}" for problem in self.problems)
        if self.unknown:
            yield f"note: not in the manifest: {printable(', '.join(self.unknown))}"
        if self.good:
            size = f"{pluralize(self.num_files, 'file')}, {pluralize(self.num_bytes, 'byte')}"
            yield f"as the manifest says: {size}, every bit of them"
        else:
            yield f"not as the manifest says: {pluralize(len(self.problems), 'problem')}"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "as_written": self.good,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "problems": list(self.problems),
            "unknown": list(self.unknown),
        }


def expected_bytes(folder: Path) -> int:
    return sum(entry["bytes"] for entry in _load(folder)["files"].values())


def check(folder: Path, progress: Progress | None = None, *, elements: bool = True) -> ManifestCheck:
    """Hash every file in the folder's manifest, and find the tensors in changed files.

    Without `elements`, neither tensors nor large copied files are read. Raise NotFoundError without a manifest,
    CorruptError if it is damaged.
    """
    content = _load(folder)
    expected: dict[str, Any] = content["files"]
    problems = []
    present = {}
    for name, entry in expected.items():
        path = confined(folder, name)
        with translate_os_errors(path):
            is_there = path.is_file()
        if not is_there:
            problems.append(f"{name}: the file is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {pluralize(path.stat().st_size, 'byte')} instead of {entry['bytes']}")
        else:
            pieces = {(offset, length): digest for offset, length, digest in entry["pieces"]}
            present[name] = FileDigest(entry["bytes"], pieces, entry["rest"])
    changes = [
        _Change(name, piece)
        for name, now in sorted(_hash_files(folder, present, progress, elements).items())
        for piece in _changed_pieces(present[name], now)
    ]
    if changes:
        copied = {name for name, file in present.items() if _is_copy(file)}
        problems += [f"{change.file}: its bytes have changed" for change in changes if change.file in copied]
        problems += _explain(folder, [change for change in changes if change.file not in copied], content["format"])
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    unknown = sorted(there - set(expected) - {MANIFEST})
    return ManifestCheck(
        str(folder), len(expected), sum(e["bytes"] for e in expected.values()), tuple(problems), tuple(unknown)
    )


def _is_copy(file: FileDigest) -> bool:
    """Return True for a file without a header before its piece."""
    return [*file.pieces] == [(0, file.size)]


def _changed_pieces(before: FileDigest, now: FileDigest) -> Iterator[Piece | None]:
    yield from (piece for piece, digest in now.pieces.items() if before.pieces[piece] != digest)
    if now.rest != before.rest:
        yield None


def _load(folder: Path) -> dict[str, Any]:
    path = confined(folder, MANIFEST)
    if not path.is_file():
        raise NotFoundError(
            "this folder has no manifest to check against",
            path=folder,
            expected=MANIFEST,
            hint="`ckpt convert` writes a manifest; or give a second checkpoint to compare with",
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("digest") != own_digest(content):
        raise CorruptError("the manifest is damaged: its digest does not match", path=path)
    if content.get("version") != _VERSION or content.get("algorithm") != ALGORITHM:
        raise CorruptError(
            "unsupported manifest version",
            path=path,
            expected=f"version {_VERSION}, {ALGORITHM}",
            found=f"version {content.get('version')}, {content.get('algorithm')}",
        )
    files = content.get("files")
    if (
        not isinstance(content.get("format"), str)
        or not isinstance(files, dict)
        or not all(map(_is_entry, files.values()))
    ):
        raise CorruptError("this manifest was not written by ckpt", path=path)
    return content


def _is_entry(entry: Any) -> bool:
    """Return True for a file with pieces in order, without overlaps, and inside the file."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or not isinstance(entry.get("rest"), str):
        return False
    if not isinstance(entry.get("pieces"), list):
        return False
    end = 0
    for piece in entry["pieces"]:
        if not isinstance(piece, list) or [type(part) for part in piece] != [int, int, str]:
            return False
        offset, length, _ = piece
        if offset < end or length < 1:
            return False
        end = offset + length
    return bool(end <= entry["bytes"])


@dataclass(frozen=True, slots=True)
class _Change:
    """A changed piece, or None for bytes outside every piece."""

    file: str
    piece: Piece | None


def _explain(folder: Path, changes: list[_Change], format: str) -> Iterator[str]:
    try:
        checkpoint = _read(folder, format)
        holders = _tensors_in(checkpoint, folder, changes)
    except CkptError as error:
        for name in dict.fromkeys(change.file for change in changes):
            yield f"{name}: its bytes have changed, and the tensors cannot be read: {error.what}"
        return
    for change in changes:
        tensors = holders.get(change, [])
        names = [f"{t.fqn} ({t.role}, {t.dtype} {list(t.shape)})" for t in tensors[:_MAX_NAMES]]
        more = f" and {len(tensors) - _MAX_NAMES} more" if len(tensors) > _MAX_NAMES else ""
        if len(tensors) > 1:
            yield f"{change.file}: one or several of {', '.join(names)}{more} have changed, or the bytes between them"
        elif tensors:
            yield f"{change.file}: {names[0]} has changed"
        else:
            yield f"{change.file}: its bytes have changed, but no tensor element has"


def _tensors_in(checkpoint: Checkpoint, folder: Path, changes: list[_Change]) -> dict[_Change, list[Tensor]]:
    by_path: dict[str, list[tuple[_Change, Piece]]] = {}
    for change in changes:
        if change.piece is not None:
            path = os.path.realpath(folder / change.file)
            by_path.setdefault(path, []).append((change, change.piece))
    found: dict[_Change, list[Tensor]] = {}
    real_paths: dict[str, str] = {}
    for tensor in checkpoint.tensors.values():
        for source in (tensor.source, *tensor.replicas):
            for fragment in source.fragments(tensor.shape):
                path, extent = fragment.extent.path, fragment.extent
                if path not in real_paths:
                    real_paths[path] = os.path.realpath(path)
                for change, (offset, length) in by_path.get(real_paths[path], ()):
                    tensors = found.setdefault(change, [])
                    if extent.offset < offset + length and offset < extent.end and tensor not in tensors[-1:]:
                        tensors.append(tensor)
    return found


def _read(folder: Path, name: str) -> Checkpoint:
    format = registry.get(name)
    found = format.find(folder, None)
    if found is None:
        raise NotFoundError(f"no {name} checkpoint is recognised any more")
    return format.read(found, ReadRequest())


def _hash_files(
    folder: Path, files: dict[str, FileDigest], progress: Progress | None, elements: bool
) -> dict[str, FileDigest]:
    """Hash the pieces and, in each file, the bytes outside them, or only the latter and small copied files."""
    found: dict[str, dict[Piece, str]] = {name: {} for name in files}
    rests: dict[str, str] = {}
    whole = {name for name, file in files.items() if elements or (_is_copy(file) and file.size <= _MAX_COPY)}
    todo = [(name, job) for name, file in files.items() for job in jobs(file.pieces) if name in whole or job is None]
    lock = threading.Lock()

    def advance(count: int) -> None:
        with lock:
            (progress or (lambda _: None))(count)

    def hash_all(todo: Iterator[tuple[str, list[Piece] | None]]) -> None:
        hasher = Hasher(advance=advance)
        with OpenFiles() as opened:
            for name, job in todo:
                path, file = str(confined(folder, name)), files[name]
                descriptor = opened.descriptor(path)
                if job is None:
                    rests[name] = hasher.rest(descriptor, path, file.size, file.pieces)
                else:
                    found[name] |= hasher.pieces(descriptor, path, job)

    in_threads(hash_all, todo)
    return {name: FileDigest(file.size, found[name], rests[name]) for name, file in files.items()}
