"""Carry out a plan: the only code that moves tensor bytes.

What is copied in one go is in `blocks`, the threads that do it in `workers`.  Work goes in the order of the target.
"""

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
from ckpt.base.sizes import show_size
from ckpt.move.blocks import batches, write_all
from ckpt.move.filehash import FileDigest, max_pieces, pieces_of
from ckpt.move.files import SharedStaging, Staging, check_destination, disk_bytes, is_filled, translate_os_errors
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
from ckpt.move.parts import Share, deal
from ckpt.move.workers import MAX_UNFINISHED, FileDigests, Output, Progress, Resources, Workers
from ckpt.plan.checkpoint import SourceFile, TargetFile
from ckpt.plan.planner import Plan
from ckpt.processes.group import Alone

#: What is cleared of what a stopped conversion kept: nothing, all, or what cannot be gone on with.
Restart = bool | Literal["stale"]

#: Codes of refusals that leave what is done as good as it was.
_PASSING = (SourceGoneError.code, "destination-exists")
_ZEROS = 1 << 20  # bytes of padding that are written at a time


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
    """Write the plan's files and move them to `destination` when all of them are complete and durable.

    `progress` is called with numbers of bytes written, from several threads, one at a time; `phase` with the name of
    what begins, and its bytes where they are measured.  `check` is called before the first byte is written, when the
    destination has been found good, and may raise.  `describe` is given the folder when it is filled, while it is still
    being synced, and the digests of all files in it; it returns the content of more files.  `verify` is given the
    folder when all of it is durable, and may raise.

    What is done is kept when it is stopped: by Ctrl-C, SIGTERM, an error of the disk or of ours.  The error then has a
    note that tells where.  The same conversion goes on with it; any other is refused, unless `restart`: True clears
    whatever was kept, "stale" what cannot be gone on with.  `say` is given a line about what was found.  Returns how
    many bytes were there already.

    All processes of `group` call it with the same plan and write a share of its bytes each; the first one of them makes
    and moves the folder, and calls all that is to be called.

    Raises StorageError for the disk's errors, CorruptError for a source that changed meanwhile, and what
    `ckpt.move.journal.read_journals` does; the destination is then as it was.
    """
    group = group or Alone()
    resources = resources or Resources()
    progress = group.counted(progress or (lambda _: None))
    is_first = group.rank == 0
    for source in plan.checkpoint.files:  # which links may have led out of the checkpoint's own folder
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
        node = _node()
        num_here = group.gather(node).count(node)
        workers = Workers(resources, progress, hashed=journal.add, num_here=num_here)

        def last() -> list[Output]:
            """Write the files that need the digests of all others, when every process has closed its own."""
            if not is_first:
                return []
            found = group.gather(workers.digests())
            phase("manifest", 0)
            more = describe(staging.path, _file_digests(found, done)).items()
            return [
                _create(Share(TargetFile.of_bytes(name, content), None), staging, workers) for name, content in more
            ]

        # The last file of one process is the first of the next, and only one of them can write to it at a time.
        at_a_time = 1 if num_here > 1 else min(workers.num_fillers, MAX_UNFINISHED)
        with workers:
            _run_in_turn((_submit(part, plan, staging, workers) for part in work), at_a_time)
            workers.join(last)
        for source in plan.checkpoint.files:
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
    """Keep what is done when the conversion is stopped, and note where it is; one that is refused keeps nothing.

    What is wrong with the source, or with what was asked for, is wrong with what is done as well; a source that is away
    may come back, and a destination that has appeared meanwhile can be removed.
    """
    try:
        yield
    except BaseException as error:
        is_refused = isinstance(error, CkptError) and not isinstance(error, StorageError) and error.code not in _PASSING
        if staging is not None and not is_refused and holds_pieces(staging.path):
            staging.keep()
            size = show_size(disk_bytes(staging.path))
            note = f"kept: {size} in {printable(str(staging.path))}; the same command goes on"
            vars(error).setdefault("__notes__", []).append(note)  # Python 3.11 has `add_note`
        raise


def _prepare(
    plan: Plan,
    staging: Staging | SharedStaging,
    resources: Resources,
    group: Alone,
    restart: Restart,
    say: Callable[[str], None],
) -> tuple[list[Share], Digests, Journal]:
    """This process's part of the work, the pieces that are there already, and the journal of this process."""
    files = plan.target.files
    at_most = max_pieces(len(files))
    pieces = {file.name: pieces_of(file, at_most) for file in files}
    begin, done = header(plan), Digests()
    _check_same_plan(begin, group)
    nodes = group.gather(_page_cache(staging.path))
    claimed = group.gather(_claimed(staging, begin, restart, say) if isinstance(staging, Staging) else {})[0]
    known = {name: {*inside} & {*claimed.get(name, ())} for name, inside in pieces.items()}
    share = {part.file.name: sorted(part.todo) for part in deal(files, pieces, known, nodes, group.rank)}
    for found in group.gather(still_there(staging.path, claimed, share, resources.max_memory)):
        for name, digests in found.items():
            done.setdefault(name, {}).update(digests)
    journal: Journal | None = None
    if isinstance(staging, Staging):
        journal = Journal(staging.path, begin, done)  # before the former ones are removed
        staging.keep_only({*done, JOURNAL})
        if group.size > 1:
            staging.share((file.name, file.size) for file in files)
    group.gather(None)
    journal = journal or Journal(staging.path, begin, {}, group.rank)
    todo = {name: set(inside) - set(done.get(name, ())) for name, inside in pieces.items()}
    return deal(files, pieces, todo, nodes, group.rank), done, journal


def _claimed(staging: Staging, begin: Mapping[str, Any], restart: Restart, say: Callable[[str], None]) -> Digests:
    """What the journals of a stopped conversion say that it has written.  What is not gone on with is cleared."""
    if not is_filled(staging.path):
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
        say(f"going on with {where} ({show_size(disk_bytes(staging.path))}), which a stopped conversion left")
    else:
        say(f"removed {where} ({show_size(staging.clear())}), which a stopped conversion left{why}")
    return claimed


def _page_cache(folder: Path) -> tuple[str, int]:
    """A key that is equal in processes that share a page cache for `folder`: one node, and the same mount."""
    with translate_os_errors(folder):
        return _node(), os.stat(folder).st_dev


def _node() -> str:
    """A key that is equal in all processes of a node, and differs between nodes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.is_file() else os.uname().nodename


def _check_same_plan(begin: Mapping[str, Any], group: Alone) -> None:
    """Raise StorageError in a process that has another plan than the first one, or sees other files."""
    first = group.gather(json.dumps(begin) if group.rank == 0 else None)[0]
    if first != json.dumps(begin) and group.size > 1:
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
    """The digests of all files that are filled and hashed, of what each process `found` and what was `done` before."""
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
    """Create a target file and hand out its copies, one batch at each step."""
    output = _create(part, staging, workers)
    for batch in batches(part.spans(plan), part.copies(plan), workers.buffer_size):
        workers.submit(output, batch)
        yield
    for name, copies in part.computed_copies(plan).items():
        workers.compute(output, copies, plan.checkpoint.computed[name])
        yield
    workers.finish(output)


def _run_in_turn(iterators: Iterable[Iterator[None]], number: int) -> None:
    """Let the first `number` iterators take a step each in turn; where one ends, the next takes its place."""
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
    """Create a target file with all that is known now."""
    file = part.file
    output = workers.open(staging.create(file.name, file.size), part)
    with translate_os_errors(file.name):
        for offset, data in file.literals if part.is_owner else ():
            write_all(output.descriptor, memoryview(data), offset)
        for offset, length in (
            file.zeros if part.is_owner and not part.is_whole else ()
        ):  # of a file that was there before
            for start in range(offset, offset + length, _ZEROS):
                write_all(output.descriptor, memoryview(bytes(min(_ZEROS, offset + length - start))), start)
    return output
