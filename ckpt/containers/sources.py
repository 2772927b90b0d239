"""Source files of a checkpoint: each is stated before it is parsed, so that a later replacement is noticed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.read import TorchFile
from ckpt.containers.torchfile.tree import Pickles
from ckpt.move.files import translate_os_errors
from ckpt.move.source import opened, read_at
from ckpt.plan.checkpoint import SourceFile

_SHOWN = 16
#: Minimum storage size, and the bytes to compare.
_TELLING, _LOOKED_AT = 64, 1 << 20
#: Folder name inside a zip that was saved to a stream without a name.
_STREAM = "archive"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class RankFile:
    path: str
    rank: int
    content: Mapping[Any, Any]

    @property
    def where(self) -> dict[str, Any]:
        return {"path": self.path, "rank": self.rank}

    def need(self, key: str) -> Any:
        if key not in self.content:
            raise CorruptError("an entry is missing", **self.where, expected=repr(key))
        return self.content[key]


@dataclass
class Sources:
    """Files read so far, and their pickles: ranks may write the same one."""

    by_path: dict[str, SourceFile] = field(default_factory=dict)
    alike: Pickles = field(default_factory=Pickles, repr=False)
    storages: dict[str, _StorageSummary] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(self.by_path.values())

    def add(self, path: str | Path) -> SourceFile:
        """Remember a file's current state. Raise NotFoundError or StorageError."""
        with translate_os_errors(path):
            return self.by_path.setdefault(str(path), SourceFile.stat(str(path)))

    def root(self, path: str | Path, *, is_named: bool = False) -> Any:
        """Remember a torch file and return its object. Raise the errors of `torchfile.read`.

        `is_named`: files of the same kind in this folder differ in their whole name, not only in their numbers.
        """
        return self._read(path, None, None, is_named).root

    def of_rank(self, path: str | Path, rank: int, what: str) -> RankFile:
        """Return the dict written by a rank. Raise CorruptError for any other object."""
        root = self._read(path, rank, self.alike).root  # other ranks may have written the same pickle
        if not isinstance(root, Mapping):
            found = type(root).__name__
            raise CorruptError(f"this is not a {what}", path=path, rank=rank, expected="a dict", found=found)
        return RankFile(str(path), rank, root)

    def _read(self, path: str | Path, rank: int | None, alike: Pickles | None, is_named: bool = False) -> TorchFile:
        self.add(path)
        file = torchfile.read(path, alike=alike)
        _check_saved_as(Path(path), rank, file.folder, is_named)
        found = tuple((one.size, one.crc32) for name, one in file.records.items() if name != "data.pkl")
        large = max(
            (one for one in file.records.values() if one.name != "data.pkl"), key=lambda one: one.size, default=None
        )
        if large is not None and large.size >= _TELLING and all(crc32 is not None for _, crc32 in found):
            self.storages[str(path)] = _StorageSummary(hash(found), large.offset, large.size, file.folder)
        return file

    def check_distinct(self, files: Iterable[tuple[int, str]], writers: Mapping[str, object] | None = None) -> None:
        """Raise CorruptError if one of `files` (by rank) is a copy of another, by all tensors' checksums.

        Equal elements are only noted if the files record different writers, in the zip's folder name or in `writers`.
        """
        first: dict[int, tuple[int, str]] = {}
        for rank, path in files:
            held = self.storages.get(path)
            if held is None:
                continue
            other = first.setdefault(held.sums, (rank, path))
            if other[1] == path or is_constant(path, held.offset, held.size, 8):
                continue
            writer, others = ((writers or {}).get(one, self.storages[one].writer) for one in (path, other[1]))
            if None not in (writer, others) and writer != others:
                self.notes.append(
                    f"{Path(path).name} of rank {rank} has the same elements as rank {other[0]}'s file, although "
                    "different ranks wrote them"
                )
            else:
                raise CorruptError(
                    "two ranks' files have the same content, and each should have its own part",
                    path=path,
                    rank=rank,
                    expected=f"content different from rank {other[0]}'s, {other[1]}",
                    found="the same checksums of all tensors",
                    hint="was one copied over the other?",
                )


@dataclass(frozen=True, slots=True)
class _StorageSummary:
    """A hash of all storages' sizes and checksums, and the position of the largest."""

    sums: int
    offset: int
    size: int
    folder: str | None

    @property
    def writer(self) -> str | None:
        return None if self.folder == _STREAM else self.folder


def is_constant(path: str, offset: int, size: int, width: int) -> bool:
    """Return True if the range repeats one value of `width` bytes. Only its first MiB is read."""
    with opened(path) as descriptor:
        data = read_at(descriptor, path, offset, min(size, _LOOKED_AT) // width * width)
    return data == data[:width] * (len(data) // width)


def _check_saved_as(path: Path, rank: int | None, folder: str | None, is_named: bool) -> None:
    name = path.name.rpartition(".")[0] or path.name
    if folder in (None, name, _STREAM):
        return
    assert folder is not None
    numbers, saved = ([int(n) for n in _DIGITS.findall(one)] for one in (name, folder))
    if is_named or (numbers != saved and _DIGITS.sub("0", folder) == _DIGITS.sub("0", name)):
        raise CorruptError(
            "the file was saved under another name",
            path=path,
            rank=rank,
            expected=f"a file saved as {name}",
            found=f"a file saved as {folder}",
            hint="were files exchanged, or one copied over another?",
        )


@contextlib.contextmanager
def structure(what: str, path: str | Path, found: Callable[[], str] = str, **where: Any) -> Iterator[None]:
    """Raise CorruptError `what` if the code inside meets an unexpected structure. `found` describes the file so far."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(what, path=path, found=f"{found()}{type(error).__name__}: {error}", **where) from error


def check_all_there(
    what: str, found: Collection[Any], expected: int | Sequence[Any], path: Path, example: str = ""
) -> None:
    """Raise IncompleteError with the missing ranks. A number stands for ranks 0 to n - 1."""
    count, expected = (expected, range(expected)) if isinstance(expected, int) else (len(expected), expected)
    missing = list(islice((rank for rank in expected if rank not in found), _SHOWN + 1))
    if missing:
        raise IncompleteError(
            what,
            path=path,
            rank=", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else ""),
            expected=pluralize(count, "file") + (f", among them {example}" if example else ""),
            found=pluralize(len(found), "file"),
        )
