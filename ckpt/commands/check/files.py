"""Completeness of files, one by one and as sets."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO

from ckpt.base.errors import (
    CkptError,
    CorruptError,
    HalfError,
    IncompleteError,
    StorageError,
    UsageError,
    printable,
)
from ckpt.containers.dcp.metadata import Places, read_metadata
from ckpt.containers.weights import MAX_INDEX, SHARD, missing_index, parse_index
from ckpt.move.files import is_broken_link
from ckpt.move.json_files import read_json
from ckpt.move.listing import LOST_AND_FOUND, names_in, once
from ckpt.move.source import Seekable, open_stream, read_file
from ckpt.runs.file_checks import ZIP, check_file, has_checked_suffix, is_unread
from ckpt.runs.file_table import TORCH_SUFFIXES
from ckpt.runs.model_files import CONFIG, is_of_diffusers
from ckpt.runs.search import PIPELINE
from ckpt.runs.steps import is_step
from ckpt.runs.tokens import TOKENIZER, tokens_without_rows
from ckpt.runs.unread_files import may_hold_tensors

INCOMPLETE, DAMAGED, UNKNOWN = "incomplete", "damaged", "unknown"
HALF = "half a checkpoint"
NOT_READ = "not all read"
#: The file is unused: this is no error.
LEFT = "not looked into"
#: The expected parts are unknown.
UNPROVED = "parts not checked"
#: Not saved, so the files are fine.
LACKING = "lacking"
#: Worth a look, but no damage: released models have it.
NOTED = "note"

_WORDS = ("missing", "truncated", "shorter", "too short", "ends within", "ends before", "zeros", "not complete")
#: The end of a name of LeRobot's processor config.
_PROCESSOR = "processor.json"
#: diffusers 0.42, `utils/constants.py`.
_OF_DIFFUSERS = "diffusion_pytorch_model"
_MAX_FILES = 200_000
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with files. `exit_code` comes from the underlying error, or is 0."""

    kind: str
    where: str
    what: str
    exit_code: int = 0

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "where": printable(self.where), "what": printable(self.what)}

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def files_below(folder: Path, without: Iterable[Path] = ()) -> list[Path]:
    """Return all files below `folder`, sorted, with broken links, without hidden folders and the folders `without`."""
    left_out = set(without)

    def walk(place: Path) -> Iterator[Path]:
        for entry in map(place.joinpath, names_in(place)):
            if entry.is_dir():
                is_hidden = entry.name.startswith(".") or entry.name == LOST_AND_FOUND
                if entry not in left_out and not is_hidden and not entry.is_symlink():
                    yield from walk(entry)
            elif entry.is_file() or (is_broken_link(entry) and has_checked_suffix(entry)):
                yield entry

    if folder.is_file():
        return [folder]
    return list(islice(walk(folder), _MAX_FILES))


def size_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if not is_broken_link(file))


def problems_of(root: Path, files: Iterable[Path], sound: Container[str] = ()) -> Iterator[Problem]:
    """Yield problems with `files` below `root`. Files in `sound` are not read."""
    by_folder: dict[Path, set[str]] = {}
    for path in files:
        by_folder.setdefault(path.parent, set()).add(path.name)
        if str(path) not in sound and (problem := _problem_in(path, root)):
            yield problem
    for folder, names in by_folder.items() if root.is_dir() else ():  # a single file is no set
        for kind, name, what in _missing(folder, names):
            yield Problem(kind, relative(folder / name, root), what)


@once  # steps share the files around them
def _problem_in(path: Path, root: Path) -> Problem | None:
    try:
        content = check_file(path, root)
    except CkptError as error:
        return _left(error, root, path) or problem_of(error, root, path)
    told = tokens_without_rows(content, path.parent) if path.name == TOKENIZER else None
    return Problem(NOTED, relative(path, root), told) if told else None


def problem_of(error: CkptError, root: Path, path: Path | None = None) -> Problem:
    facts = error.facts()
    where = Path(error.path) if error.path is not None else path or root
    parts = [f"{name} {facts[name]}" for name in ("tensor", "rank", "expected", "found") if name in facts]
    what = error.what + (f" ({', '.join(parts)})" if parts else "")
    if isinstance(error, UsageError) and error.hint:  # the user has to choose
        what += f"; {error.hint}"
    return Problem(_kind_of_problem(error), relative(where, root), what, error.exit_code)


def _left(error: CkptError, root: Path, path: Path) -> Problem | None:
    return Problem(LEFT, relative(path, root), f"{LEFT}: {error.what}") if is_unread(error, path) else None


def _kind_of_problem(error: CkptError) -> str:
    if isinstance(error, HalfError):
        return HALF
    if not isinstance(error, CorruptError):
        return UNKNOWN
    is_incomplete = isinstance(error, IncompleteError) or any(word in error.what for word in _WORDS)
    return INCOMPLETE if is_incomplete else DAMAGED


def relative(path: Path, root: Path) -> str:
    """Return a path relative to `root` if below it, else the name only."""
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else path.name


def _missing(folder: Path, names: set[str]) -> Iterator[tuple[str, str, str]]:
    sets: dict[tuple[str, str, int], set[int]] = {}
    for name in names:
        if (shard := SHARD.fullmatch(name)) is not None:
            key = (shard["stem"], shard["suffix"], int(shard["count"]))
            sets.setdefault(key, set()).add(int(shard["number"]))
    indexes = {
        n: _named_by_index(folder / n) for n in names if n.endswith((".safetensors.index.json", ".bin.index.json"))
    }
    listed_names = set()
    for (stem, suffix, count), numbers in sorted(sets.items()):
        index = f"{stem}{suffix}.index.json"
        if (named := indexes.get(index)) and not any(name.endswith(f"-of-{count:05}{suffix}") for name in named):
            continue  # from another save, absent from the index
        missing = sorted(set(range(1, min(count, _MAX_FILES) + 1)) - numbers)
        for number in missing:
            listed_names.add(name := f"{stem}-{number:05}-of-{count:05}{suffix}")
            yield INCOMPLETE, name, f"the shard is missing, {len(numbers)} of {count} are there"
        if missing_index(folder / f"{stem}-00001-of-{count:05}{suffix}"):
            if missing:
                yield INCOMPLETE, index, "the shard index is missing; it is written after the shards"
            else:
                yield LACKING, index, "the index is missing; every shard is here, transformers loads none without it"
    for name, named in sorted(indexes.items()):
        yield from ((INCOMPLETE, gone, f"missing, {name} names it") for gone in sorted(named - names - listed_names))
    for name in sorted(names):
        parts = [one for one in _named_by_config(folder / name) if _is_missing(folder / one)]
        yield from ((INCOMPLETE, one, f"missing, {name} names it") for one in parts)
    weights = [name for name in names if name.startswith(_OF_DIFFUSERS)]
    if weights and CONFIG not in names and (is_step(folder.parent) or (folder.parent / PIPELINE).is_file()):
        yield INCOMPLETE, CONFIG, f"missing, diffusers can't load {min(weights)} without it"
    if not weights and is_step(folder.parent) and is_of_diffusers(folder) and not may_hold_tensors(folder):
        yield INCOMPLETE, f"{_OF_DIFFUSERS}.safetensors", f"the model's weights are missing, {CONFIG} is there"
    if any(name.endswith(".distcp") for name in names) and not any(name.endswith(".metadata") for name in names):
        what = "the metadata is missing; it is a hidden file that `cp *` skips, and torch writes it last"
        yield INCOMPLETE, ".metadata", what


def _is_missing(part: Path) -> bool:
    return not (names_in(part) if part.is_dir() else part.exists())


def _named_by_index(index: Path) -> set[str]:
    try:
        content = read_json(index, max_bytes=MAX_INDEX)
        return set(parse_index(content, index, suffixes=(".safetensors", ".bin")).weight_map.values())
    except CkptError:  # a damaged index is reported with its file
        return set()


def _named_by_config(path: Path) -> list[str]:
    """Return the folders in a diffusers pipeline's index, or the files in a LeRobot processor's config."""
    if path.name != PIPELINE and not path.name.endswith(_PROCESSOR):
        return []
    try:
        content = read_json(path)
    except CkptError:  # reported with its file
        return []
    config = content if isinstance(content, dict) else {}
    if path.name == PIPELINE:
        found = [name for name, one in config.items() if isinstance(one, list) and None not in one]
    else:
        steps = config.get("steps")
        found = [one.get("state_file") for one in steps if isinstance(one, dict)] if isinstance(steps, list) else []
    return [name for name in found if isinstance(name, str) and Path(name).name == name]


@dataclass(slots=True)
class ComparedBytes:
    compared: int = 0
    without: int = 0


def read_all(
    root: Path, files: Iterable[Path], count: ComparedBytes, progress: Callable[[int], None]
) -> Iterator[Problem]:
    """Compare CRC-32s in torch's zip files, and read all other files to the end."""
    places = cache(lambda folder: read_metadata(folder).places)  # for a folder's `.distcp` files
    for path in files:
        size = 0
        try:
            size = path.stat().st_size
            if path.suffix == ".distcp":
                _read_items(path, places(path.parent), count)
            elif path.name.endswith(TORCH_SUFFIXES) and read_file(path, 4) == ZIP:
                with open_stream(path) as file:
                    _compare(file, path, count)
            else:
                with open_stream(path) as file:
                    _read_on(file, count)
        except OSError as error:
            what = f"the file cannot be read: {error.strerror}"
            yield Problem(UNKNOWN, relative(path, root), what, StorageError.exit_code)
        except CkptError as error:
            yield problem_of(error, root, path)
        progress(size)


def _read_items(path: Path, places: Places, count: ComparedBytes) -> None:
    here = {row for row, name in enumerate(places.paths) if Path(name).name == path.name}
    with open_stream(path) as file:
        for offset, length in sorted({(places.offsets[row], places.lengths[row]) for row in here}):
            file.seek(offset)
            if file.read(4) != ZIP:  # safetensors items have no checksums
                file.seek(0)
                _read_on(file, count)
                return
            _compare(_FileRange(file, offset, length), path, count)


def _read_on(file: io.BufferedReader, count: ComparedBytes) -> None:
    buffer = bytearray(_BLOCK)
    while size := file.readinto(buffer):
        count.without += size


def _compare(file: IO[bytes] | _FileRange, path: Path, count: ComparedBytes) -> None:
    """Compare each zip record's CRC-32. 0 means that torch wrote none."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.CRC:
                    count.without += info.file_size
                    continue
                with archive.open(info) as record:
                    while block := record.read(_BLOCK):
                        count.compared += len(block)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise CorruptError("checksum mismatch in the zip file", path=path, found=str(error)) from None


class _FileRange(Seekable):
    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__(length)
        self._file, self._offset = file, offset

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._offset + self._at)
        found = self._file.read(left if count < 0 else min(count, left))
        self._at += len(found)
        return found
