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
from typing import Any

from ckpt.base.errors import StorageError
from ckpt.move.blocks import batches, write_all
from ckpt.move.filehash import FileDigest, max_pieces, pieces_of
from ckpt.move.files import SharedStaging, Staging, check_destination, translate_os_errors
from ckpt.move.journal import Digests, Journal, header, read_journals, remove_journals, still_there
from ckpt.move.parts import Share, deal
from ckpt.move.workers import MAX_UNFINISHED, FileDigests, Output, Progress, Resources, Workers
from ckpt.plan.checkpoint import SourceFile, TargetFile
from ckpt.plan.planner import Plan
from ckpt.processes.group import Alone

_ZEROS = 1 << 20  # bytes of padding that are written at a time


def execute(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    resources: Resources | None = None,
    progress: Progress | None = None,
    phase: Callable[[str], None] = lambda _: None,
    hashing: bool = False,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
    group: Alone | None = None,
    clearing: Callable[[Path, int], None] = lambda *_: None,
) -> int:
    """Write the plan's files and move them to `destination` when all of them are complete and durable.

    `progress` is called with numbers of bytes written, from several threads, one at a time, `phase` with the name of
    what begins.  `check` is called before the first byte is written, when the destination has been found good, and may
    raise.  `describe` is given the folder when it is filled, while it is still being synced, and where `hashing` the
    digests of all files in it; it returns the content of more files.  `resume` goes on where a run that was `hashing`
    was killed, and leaves what was written where it fails itself; without it `clearing` is called with the path and the
    bytes of what such a run left, before that is removed.  Returns how many bytes were there already.

    All processes of `group` call it with the same plan and write a share of its bytes each; the first one of them makes
    and moves the folder, and calls all that is to be called.

    Raises StorageError for the disk's errors, CorruptError for a source that changed meanwhile, and what
    `ckpt.move.journal.read_journals` does; the destination is then as it was.
    """
    group = group or Alone()
    resources = resources or Resources()
    progress = group.counted(progress or (lambda _: None))
    hashing = hashing or resume or group.size > 1
    is_first = group.rank == 0
    for source in plan.checkpoint.files:  # which links may have led out of the checkpoint's own folder
        check_destination(destination, Path(source.path))
    how: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "clearing": clearing}
    whole = Staging(destination, total_bytes=plan.total_bytes, **how) if is_first else None
    with whole or contextlib.nullcontext(SharedStaging(destination)) as staging:
        work, done, journal = _prepare(plan, staging, resources, group, hashing=hashing, resume=resume)
        if is_first:
            check()
        group.gather(None)
        phase("move")
        num_done = sum(length for pieces in done.values() for _, length in pieces)
        progress(num_done if is_first else 0)
        hashed = journal.add if journal is not None else lambda *_: None
        node = _node()
        num_here = group.gather(node).count(node)
        workers = Workers(resources, progress, hashing=hashing, hashed=hashed, num_here=num_here)

        def last() -> list[Output]:
            """Write the files that need the digests of all others, when every process has closed its own."""
            if not is_first:
                return []
            found = group.gather(workers.digests())
            phase("manifest")
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
            phase("commit")
            if journal is not None:
                remove_journals(whole.path, group.size)
            whole.commit()
    return num_done


def _prepare(
    plan: Plan,
    staging: Staging | SharedStaging,
    resources: Resources,
    group: Alone,
    *,
    hashing: bool,
    resume: bool,
) -> tuple[list[Share], Digests, Journal | None]:
    """This process's part of the work, the pieces that are there already, and a journal where there is `hashing`."""
    files = plan.target.files
    if not hashing:
        return [Share(file, None) for file in files], {}, None
    at_most = max_pieces(len(files))
    pieces = {file.name: pieces_of(file, at_most) for file in files}
    begin, done = header(plan), Digests()
    _check_same_plan(begin, group)
    nodes = group.gather(_page_cache(staging.path))
    if resume:
        claimed = group.gather(read_journals(staging.path, begin) if group.rank == 0 else {})[0]
        known = {name: {*inside} & {*claimed.get(name, ())} for name, inside in pieces.items()}
        share = {part.file.name: sorted(part.todo) for part in deal(files, pieces, known, nodes, group.rank)}
        for found in group.gather(still_there(staging.path, claimed, share, resources.max_memory)):
            for name, digests in found.items():
                done.setdefault(name, {}).update(digests)
    if isinstance(staging, Staging):
        if resume:
            staging.keep_only(done)
        if group.size > 1:
            staging.share((file.name, file.size) for file in files)
    group.gather(None)
    journal = Journal(staging.path, begin, group.rank)
    for name, digests in done.items() if group.rank == 0 else ():
        journal.add(name, digests)
    todo = {name: set(inside) - set(done.get(name, ())) for name, inside in pieces.items()}
    return deal(files, pieces, todo, nodes, group.rank), done, journal


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
