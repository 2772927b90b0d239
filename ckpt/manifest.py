"""`ckpt-manifest.json`: digests of what a conversion wrote, against which the folder can be checked later.

It holds the size and the xxh3-128 of every file, so that every bit is accounted for (headers, pickles and padding too),
and the logical digest of every tensor (`ckpt.digest`), under the names that the format itself stores.  It has a digest
of its own, and nothing in it depends on time or place: the same conversion writes the same manifest.

It is made on request: like-for-like bytes are copied inside the kernel and never seen here, so all that was written is
read again, which takes about as much processor time as `cp` of it, and the disk's time where it exceeds the page cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from ckpt.checkpoint import BUFFER, MASTER, Checkpoint, Format, Key, ReadRequest
from ckpt.companions import read_json
from ckpt.digest import ALGORITHM, Progress, digests, in_threads
from ckpt.errors import CkptError, CorruptError, NotFoundError, printable
from ckpt.files import OpenFiles, confined, translate_os_errors
from ckpt.tensors import Tensor

MANIFEST = "ckpt-manifest.json"

_VERSION = 1
_CHUNK = 1 << 20


def make_manifest(folder: Path, format: Format, names: Iterable[str]) -> bytes:
    """The manifest of the files `names` of a checkpoint of `format` that lies in `folder`."""
    files = _hash_files(folder, names)
    found = format.find(folder, None)
    if found is None:
        raise CorruptError(f"what was written is not recognised as {format.name}", path=folder)
    checkpoint = format.read(found, ReadRequest())
    tensors = digests(checkpoint)
    content = {
        "version": _VERSION,
        "algorithm": ALGORITHM,
        "format": format.name,
        "names": checkpoint.namespace,
        "digests": tensors.whole,
        "files": {name: {"bytes": size, "digest": digest} for name, (size, digest) in sorted(files.items())},
        "tensors": [tensor.to_json() for tensor in tensors.tensors],
    }
    return _dump(content | {"digest": _own_digest(content)})


def _dump(content: dict[str, Any]) -> bytes:
    """JSON with one line for each file and tensor."""
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


def _own_digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of checking a folder: `problems` with files and tensors, and files that the manifest does not know."""

    path: str
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield from (f"* {printable(problem)}" for problem in self.problems)
        if self.unknown:
            yield f"note: not in the manifest: {printable(', '.join(self.unknown))}"
        if self.good:
            yield f"as the manifest says: {self.num_files} files, {self.num_bytes} bytes, every bit of them"
        else:
            yield f"not as the manifest says: {len(self.problems)} problem" + ("s" if len(self.problems) > 1 else "")

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
    """Bytes of all files that the manifest of `folder` names."""
    return sum(entry["bytes"] for entry in _load(folder)["files"].values())


def check(folder: Path, formats: Iterable[Format], progress: Progress | None = None) -> Checked:
    """Hash every file that the manifest in `folder` names, and find which tensors are in those that changed.

    `formats` are those that may have written it.  Raises NotFoundError where there is no manifest and CorruptError
    where it is damaged itself.
    """
    content = _load(folder)
    expected: dict[str, Any] = content["files"]
    problems = []
    present = []
    for name, entry in expected.items():
        path = confined(folder, name)
        if not path.is_file():
            problems.append(f"{name}: the file is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes instead of {entry['bytes']}")
        else:
            present.append(name)
    found = _hash_files(folder, present, progress)
    changed = [name for name in present if found[name][1] != expected[name]["digest"]]
    if changed:
        problems += _changed_tensors(folder, changed, content, formats)
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    unknown = sorted(there - set(expected) - {MANIFEST})
    return Checked(
        str(folder), len(expected), sum(e["bytes"] for e in expected.values()), tuple(problems), tuple(unknown)
    )


def _load(folder: Path) -> dict[str, Any]:
    path = confined(folder, MANIFEST)
    if not path.is_file():
        raise NotFoundError(
            "there is no manifest to check this folder against",
            path=folder,
            expected=MANIFEST,
            hint="`ckpt convert --manifest` writes one; give a second checkpoint to compare with it",
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("digest") != _own_digest(content):
        raise CorruptError("the manifest itself is damaged: its own digest does not fit", path=path)
    if content.get("version") != _VERSION or content.get("algorithm") != ALGORITHM:
        raise CorruptError(
            "the manifest is of another version",
            path=path,
            expected=f"version {_VERSION}, {ALGORITHM}",
            found=f"version {content.get('version')}, {content.get('algorithm')}",
        )
    return content


def _changed_tensors(
    folder: Path, changed: list[str], content: dict[str, Any], formats: Iterable[Format]
) -> Iterator[str]:
    """What differs in the files `changed`: tensors by name, or else that it lies outside of all tensors."""
    where = {os.path.realpath(folder / name): name for name in changed}
    before = {_identity(entry): entry["digest"] for entry in content["tensors"]}
    explained: set[str] = set()
    try:
        checkpoint = _read(folder, content["format"], formats)
        for copy in _copies(checkpoint):
            paths = {key: _names(tensor, where) for key, tensor in copy.tensors.items()}
            now = digests(copy, wanted=partial(_is_key_of, {key for key, names in paths.items() if names}))
            for tensor in now.tensors:
                if before.get(_identity(tensor.to_json())) != tensor.digest:
                    key = tensor.fqn, tensor.role
                    files = paths.get(key) or paths.get((tensor.fqn, BUFFER)) or paths.get((tensor.fqn, MASTER), set())
                    explained |= files
                    text = f"{tensor.role}, {tensor.dtype} {list(tensor.shape)}"
                    yield f"{', '.join(sorted(files))}: {tensor.fqn} ({text}) has changed"
    except CkptError as error:
        for name in changed:
            yield f"{name}: its bytes have changed, and the tensors cannot be read: {error.what}"
        return
    for name in changed:
        if name not in explained:
            yield f"{name}: its bytes have changed, outside of the elements of every tensor"


def _read(folder: Path, name: str, formats: Iterable[Format]) -> Checkpoint:
    format = next((one for one in formats if one.name == name), None)
    found = None if format is None else format.find(folder, None)
    if format is None or found is None:
        raise NotFoundError(f"no {name} checkpoint is recognised any more")
    return format.read(found, ReadRequest())


def _copies(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The checkpoint with each copy of tensors that several ranks hold in turn, so that the damaged one is named."""
    num_copies = max((1 + len(tensor.replicas) for tensor in checkpoint.tensors.values()), default=1)
    for number in range(num_copies):
        tensors = {}
        for key, tensor in checkpoint.tensors.items():
            sources = (tensor.source, *tensor.replicas)
            if number < len(sources):
                tensors[key] = replace(tensor, source=sources[number], replicas=())
        yield replace(checkpoint, tensors=tensors)


def _names(tensor: Tensor, where: dict[str, str]) -> set[str]:
    """Which of the files `where` hold part of the tensor."""
    return {name for f in tensor.fragments() if (name := where.get(os.path.realpath(f.extent.path)))}


def _is_key_of(keys: set[Key], tensor: Tensor) -> bool:
    return (tensor.fqn, tensor.role) in keys


def _identity(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["kind"], entry["fqn"], entry["role"]


def _hash_files(folder: Path, names: Iterable[str], progress: Progress | None = None) -> dict[str, tuple[int, str]]:
    """Size and digest of each file."""
    found: dict[str, tuple[int, str]] = {}
    advance = progress or (lambda _: None)

    def hash_all(jobs: Iterator[str]) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        with OpenFiles() as files:
            for name in jobs:
                path, hasher, size = str(confined(folder, name)), xxh3_128(), 0
                descriptor = files.descriptor(path)
                with translate_os_errors(path):
                    while count := os.preadv(descriptor, (buffer,), size):
                        hasher.update(buffer[:count])
                        size += count
                        advance(count)
                found[name] = size, hasher.hexdigest()

    in_threads(hash_all, names)
    return found
