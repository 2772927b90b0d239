"""Execution of a plan, in the target's order."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ckpt.base.errors import CkptError, CorruptError, SourceGoneError, StorageError, UsageError, printable
from ckpt.base.text import show_size
from ckpt.move.blocks import batches, write_all
from ckpt.move.file_pieces import FileDigest, Share, deal, max_pieces, pieces_of, units_of
from ckpt.move.files import SharedStaging, Staging, check_destination, disk_bytes, translate_os_errors
from ckpt.move.journal import (
    JOURNAL,
    Digests,
    Journal,
    header,
    holds_pieces,
    read_journals,
    still_there,
    without_journals,
)
from ckpt.move.workers import MAX_UNFINISHED, FileDigests, Output, Progress, Resources, Workers
from ckpt.plan.checkpoint import SourceFile, TargetFile
from ckpt.plan.planner import Plan
from ckpt.processes.group import Alone

#: "stale": only leftovers that can't be continued.
Restart = bool | Literal["stale"]

#: Error codes after which finished work can be kept.
_PASSING = (SourceGoneError.code, "destination-exists")
_ZEROS = 1 << 20  # padding bytes per write
#: Cluster file systems that lock pages across nodes. NFS doesn't.
_COHERENT = ("lustre", "gpfs")


def execute(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    restart: Restart = False,
    resources: Resources | None = None,
    progress: Progress | None = None,
    phase: Callable[[str, int], None] = lambda *_: None,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
    verify: Callable[[Path, Progress], None] = lambda *_: None,
    group: Alone | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Write the files, and move them to `destination` once they are durable.

    Callbacks: `check` runs before the first byte is written and may raise. `progress` gets numbers of bytes written.
    `phase` gets the name of each phase, and its bytes if known. `describe` gets the filled folder (still syncing) with
    its files' digests, and returns contents of further files. `verify` gets the durable folder and may raise. `say`
    gets a line about leftovers.

    If stopped by Ctrl-C, SIGTERM, a disk error or our own error, finished work is kept. The same conversion continues
    it. Any other conversion is refused, unless `restart` is True (clear everything) or "stale" (clear what can't be
    continued). Return the number of bytes that already existed.

    All processes in `group` call this with the same plan, and each writes a share. The first process creates and moves
    the folder and runs the callbacks.

    Raise StorageError for disk errors, CorruptError if the source changed in the meantime, and the errors of
    `ckpt.move.journal.read_journals`. The destination is then unchanged.
    """
    group = group or Alone()
    resources = resources or Resources()
    progress = group.count_all_ranks(progress or (lambda _: None))
    is_first = group.rank == 0
    for source in plan.sources:  # links may leave the checkpoint's folder
        check_destination(destination, Path(source.path))
    whole = Staging(destination, overwrite=overwrite, total_bytes=plan.total_bytes) if is_first else None
    with whole or contextlib.nullcontext(SharedStaging(destination)) as staging, _keeping(whole):
        work, done, journal = _prepare(plan, staging, resources, group, restart, say)
        if is_first:
            check()
        group.gather(None)
        phase("move", plan.moved_bytes)
        num_done = sum(length for pieces in done.values() for _, length in pieces)
        progress(num_done if is_first else 0)
        node = _node() if group.size > 1 else None
        num_here = group.gather(node).count(node)
        workers = Workers(resources, progress, hashed=journal.add, num_here=num_here)

        def last() -> list[Output]:
            """Write the files that need all digests."""
            if not is_first:
                return []
            found = group.gather(workers.digests())
            phase("manifest", 0)
            more = describe(staging.path, _file_digests(found, done)).items()
            return [
                _create(Share(TargetFile.of_bytes(name, content), None), staging, workers) for name, content in more
            ]

        # Only one process can write to a file at a time, and neighbours share one at their border.
        at_a_time = 1 if num_here > 1 else min(workers.num_fillers, MAX_UNFINISHED)
        with workers:
            _run_in_turn((_submit(part, plan, staging, workers) for part in work), at_a_time)
            workers.join(last)
        for source in plan.sources:
            with translate_os_errors(source.path):
                source.check_unchanged()
        if whole is None:
            group.gather(workers.digests())
        else:
            verify(whole.path, progress)
            phase("commit", 0)
            with without_journals(whole.path, group.size):
                whole.commit()
    return num_done


@contextlib.contextmanager
def _keeping(staging: Staging | None) -> Iterator[None]:
    """Keep finished work if the conversion is stopped.

    Keep nothing if the source is damaged or the request is wrong. Keep finished work if the source is only unavailable,
    or the destination appeared in the meantime.
    """
    try:
        yield
    except BaseException as error:
        is_refused = isinstance(error, CkptError) and not isinstance(error, StorageError) and error.code not in _PASSING
        if staging is not None and not is_refused and holds_pieces(staging.path):
            staging.keep()
            size = show_size(disk_bytes(staging.path))
            note = f"kept: {size} in {printable(str(staging.path))}; rerun the command to continue"
            vars(error).setdefault("__notes__", []).append(note)  # `add_note` needs Python 3.11
        raise


def _prepare(
    plan: Plan,
    staging: Staging | SharedStaging,
    resources: Resources,
    group: Alone,
    restart: Restart,
    say: Callable[[str], None],
) -> tuple[list[Share], Digests, Journal]:
    files = plan.target.files
    at_most = max_pieces(len(files))
    pieces = {file.name: pieces_of(file, at_most) for file in files}
    units = units_of(plan, pieces) if group.size > 1 else {}
    begin, done = header(plan), Digests()
    if group.size > 1:
        _check_same_plan(begin, group)
    nodes = group.gather(_page_cache(staging.path) if group.size > 1 else None)
    claimed = group.gather(_claimed(staging, begin, restart, say) if isinstance(staging, Staging) else {})[0]
    if claimed:
        known = {name: {*inside} & {*claimed.get(name, ())} for name, inside in pieces.items()}
        share = {part.file.name: sorted(part.todo) for part in deal(files, pieces, known, nodes, group.rank, units)}
        for found in group.gather(still_there(staging.path, claimed, share, resources.max_memory)):
            for name, digests in found.items():
                done.setdefault(name, {}).update(digests)
    journal: Journal | None = None
    if isinstance(staging, Staging):
        journal = Journal(staging.path, begin, done)  # before removing the old journals
        staging.keep_only({*done, JOURNAL})
        if group.size > 1:
            staging.share((file.name, file.size) for file in files)
    group.gather(None)
    journal = journal or Journal(staging.path, begin, {}, group.rank)
    todo = {name: set(inside) - set(done.get(name, ())) for name, inside in pieces.items()}
    return deal(files, pieces, todo, nodes, group.rank, units), done, journal


def _claimed(staging: Staging, begin: Mapping[str, Any], restart: Restart, say: Callable[[str], None]) -> Digests:
    """Return the pieces written by a stopped conversion, or clear them."""
    if not staging.has_leftovers:
        return {}
    claimed, why = Digests(), ""
    if restart is not True:
        try:
            claimed = read_journals(staging.path, begin)
        except (CorruptError, UsageError) as error:
            if not restart:
                raise
            why = f": {error.what}"
    where = printable(str(staging.path))
    if claimed:
        say(f"continuing {where} ({show_size(disk_bytes(staging.path))}), left by a stopped conversion")
    else:
        say(f"removed {where} ({show_size(staging.clear())}), left by a stopped conversion{why}")
    return claimed


def _page_cache(folder: Path) -> tuple[str, int]:
    """Return a key shared by processes that can write to one page of a file: same node and mount, or coherent nodes."""
    with translate_os_errors(folder):
        device = os.stat(folder).st_dev
        kind = _file_system(device)
    return (kind, 0) if kind in _COHERENT else (_node(), device)


def _file_system(device: int) -> str:
    """Return the name of the file system on `device`, empty if unknown."""
    mounts, number = Path("/proc/self/mountinfo"), f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(errors="replace").splitlines() if mounts.is_file() else ():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


def _node() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.is_file() else os.uname().nodename


def _check_same_plan(begin: Mapping[str, Any], group: Alone) -> None:
    """Raise StorageError in a process with another plan or other files."""
    first = group.gather(json.dumps(begin) if group.rank == 0 else None)[0]
    if first != json.dumps(begin):
        here = {path: SourceFile(path, *facts).facts() for path, *facts in begin["sources"]}
        there = {path: SourceFile(path, *facts).facts() for path, *facts in json.loads(str(first))["sources"]}
        path = next((path for path in {**there, **here} if there.get(path) != here.get(path)), None)
        raise StorageError(
            "the processes do not see the same files" if path else "the processes made different plans",
            path=path,
            expected=there.get(path, "no such file") if path else "the same options and version of ckpt",
            found=here.get(path, "no such file") if path else None,
            hint="give a source that all nodes share",
        )


def _file_digests(found: Iterable[tuple[Digests, Mapping[str, tuple[int, str]]]], done: Digests) -> FileDigests:
    together = {name: dict(digests) for name, digests in done.items()}
    rests: dict[str, tuple[int, str]] = {}
    for pieces, of_rests in found:
        rests |= of_rests
        for name, digests in pieces.items():
            together.setdefault(name, {}).update(digests)
    return {
        name: FileDigest(size, dict(sorted(together.get(name, {}).items())), rest)
        for name, (size, rest) in sorted(rests.items())
    }


def _submit(part: Share, plan: Plan, staging: Staging | SharedStaging, workers: Workers) -> Iterator[None]:
    output = _create(part, staging, workers)
    for batch in batches(part.spans(plan), part.copies(plan), workers.buffer_size):
        workers.submit(output, batch)
        yield
    for name, copies in part.computed_copies(plan).items():
        workers.compute(output, copies, plan.checkpoint.computed[name])
        yield
    workers.finish(output)


def _run_in_turn(iterators: Iterable[Iterator[None]], number: int) -> None:
    """Step through `number` iterators in turn. The next one replaces a finished one."""
    end = object()
    waiting = iter(iterators)
    running = deque(islice(waiting, number))
    while running:
        one = running.popleft()
        if next(one, end) is end:
            running.extend(islice(waiting, 1))
        else:
            running.append(one)


def _create(part: Share, staging: Staging | SharedStaging, workers: Workers) -> Output:
    file = part.file
    output = workers.open(staging.create(file.name, file.size), part)
    with translate_os_errors(file.name):
        for offset, data in part.literals():
            write_all(output.descriptor, data, offset)
        for offset, length in () if part.is_whole else part.zeros():  # a reused file is not zeroed
            for start in range(offset, offset + length, _ZEROS):
                write_all(output.descriptor, memoryview(bytes(min(_ZEROS, offset + length - start))), start)
    return output
