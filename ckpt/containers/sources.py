"""The files that a checkpoint is described from: each is stated before it is parsed, and remembered.

A format's reader asks here for the object in a torch file, and hands `Sources.files` on in its `Checkpoint`, so that a
file that is replaced meanwhile is noticed.  What a damaged or hostile file makes of the reader's own expectations
(an entry that is missing, of another type, too short) is told as what it is by `structure`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.alike import Pickles
from ckpt.errors import CorruptError, IncompleteError
from ckpt.move.files import translate_os_errors
from ckpt.plan.checkpoint import SourceFile

#: Ranks that a message lists at most.
_SHOWN = 16


@dataclass(frozen=True)
class RankFile:
    """What one rank wrote into one file."""

    path: str
    rank: int
    content: Mapping[Any, Any]

    def need(self, key: str) -> Any:
        """An entry; CorruptError where there is none."""
        if key not in self.content:
            raise CorruptError("an entry is missing", path=self.path, rank=self.rank, expected=repr(key))
        return self.content[key]


@dataclass
class Sources:
    """The files that have been read so far, by path, and pickles that many ranks may have written alike."""

    by_path: dict[str, SourceFile] = field(default_factory=dict)
    alike: Pickles = field(default_factory=Pickles, repr=False)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(self.by_path.values())

    def add(self, path: str | Path) -> SourceFile:
        """Remember a file as it is now; NotFoundError or StorageError where it cannot be stated."""
        with translate_os_errors(path):
            return self.by_path.setdefault(str(path), SourceFile.stat(str(path)))

    def root(self, path: str | Path) -> Any:
        """The object in a torch file, which is remembered.  Raises what `torchfile.read` raises."""
        self.add(path)
        return torchfile.read(path).root

    def of_rank(self, path: str | Path, rank: int, what: str) -> RankFile:
        """The dict that a rank wrote; CorruptError, saying that this is no `what`, where it is something else."""
        self.add(path)
        root = torchfile.read(path, alike=self.alike).root  # which other ranks may have written, too
        if not isinstance(root, Mapping):
            found = type(root).__name__
            raise CorruptError(f"this is no {what}", path=path, rank=rank, expected="a dict", found=found)
        return RankFile(str(path), rank, root)


@contextlib.contextmanager
def structure(what: str, path: str | Path, found: Callable[[], str] = str, **where: Any) -> Iterator[None]:
    """CorruptError `what` for the errors that code raises when what it takes apart is built in an unknown way.

    `found` gives what is known of the file by then; `where` is the error's rank, fqn and expectation.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(what, path=path, found=f"{found()}{type(error).__name__}: {error}", **where) from error


def check_all_there(
    what: str, found: Collection[Any], expected: int | Sequence[Any], path: Path, example: str = ""
) -> None:
    """IncompleteError that names what of `expected`, ranks or their number as a file says it, is not in `found`."""
    count, expected = (expected, range(expected)) if isinstance(expected, int) else (len(expected), expected)
    missing = list(islice((rank for rank in expected if rank not in found), _SHOWN + 1))
    if missing:
        raise IncompleteError(
            what,
            path=path,
            rank=", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else ""),
            expected=f"{count} files" + (f", among them {example}" if example else ""),
            found=f"{len(found)} files",
        )
