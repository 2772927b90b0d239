"""Carry out a plan: the only code that moves tensor bytes.

What is copied in one go is in `blocks`, the threads that do it in `workers`.  Work goes in the order of the target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from ckpt.move.blocks import batches, write_all
from ckpt.move.filehash import FileDigest, max_pieces, pieces_of
from ckpt.move.files import Staging, check_destination, translate_os_errors
from ckpt.move.journal import Digests, Journal, header, read_journals, still_there
from ckpt.move.parts import Part, parts
from ckpt.move.workers import MAX_UNFINISHED, FileDigests, Output, Progress, Resources, Workers
from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.planner import Plan

_ZEROS = 1 << 20  # bytes of padding that are written at a time


def execute(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    resources: Resources | None = None,
    progress: Progress | None = None,
    hashing: bool = False,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
) -> int:
    """Write the plan's files and move them to `destination` when all of them are complete and durable.

    `progress` is called with numbers of bytes written, from several threads, one at a time.  `check` is called before
    the first byte is written, when the destination has been found good, and may raise.  `describe` is given the
    folder when it is filled, while it is still being synced, and where `hashing` the digests of all files in it; it
    returns the content of more files.  `resume` goes on where a run that was `hashing` was killed, and leaves what was
    written where it fails itself.  Returns how many bytes were there already.

    Raises StorageError for the disk's errors, CorruptError for a source that changed meanwhile, and what
    `ckpt.move.journal.read_journals` does; the destination is then as it was.
    """
    resources = resources or Resources()
    progress = progress or (lambda _: None)
    hashing = hashing or resume
    for source in plan.checkpoint.files:  # which links may have led out of the checkpoint's own folder
        check_destination(destination, Path(source.path))
    with Staging(destination, overwrite=overwrite, total_bytes=plan.total_bytes, resume=resume) as staging:
        work, done, journal = _prepare(plan, staging, resources, hashing=hashing, resume=resume)
        check()
        num_done = sum(length for pieces in done.values() for _, length in pieces)
        progress(num_done)
        hashed = journal.add if journal is not None else lambda *_: None
        workers = Workers(resources, progress, hashing=hashing, hashed=hashed)
        with workers:
            _run_in_turn(
                (_submit(part, plan, staging, workers) for part in work), min(workers.num_fillers, MAX_UNFINISHED)
            )
            workers.join(
                lambda: [
                    _create(Part(TargetFile.of_bytes(name, content), None), staging, workers)
                    for name, content in describe(staging.path, _file_digests(*workers.digests(), done)).items()
                ]
            )
        for source in plan.checkpoint.files:
            with translate_os_errors(source.path):
                source.check_unchanged()
        if journal is not None:
            journal.remove()
        staging.commit()
    return num_done


def _prepare(
    plan: Plan, staging: Staging, resources: Resources, *, hashing: bool, resume: bool
) -> tuple[list[Part], Digests, Journal | None]:
    """What is to be done, the pieces that are there already, and a journal where there is `hashing`."""
    files = plan.target.files
    if not hashing:
        return [Part(file, None) for file in files], {}, None
    at_most = max_pieces(len(files))
    pieces = {file.name: pieces_of(file, at_most) for file in files}
    begin, done = header(plan), Digests()
    if resume:
        done = still_there(staging.path, read_journals(staging.path, begin), pieces, resources.max_memory)
        staging.keep_only(done)
    todo = {name: inside if name not in done else set(inside) - set(done[name]) for name, inside in pieces.items()}
    journal = Journal(staging.path, begin)
    for name, digests in done.items():
        journal.add(name, digests)
    return parts(files, pieces, todo), done, journal


def _file_digests(pieces: Digests, rests: Mapping[str, tuple[int, str]], done: Digests) -> FileDigests:
    """The digests of all files that are filled and hashed."""
    return {
        name: FileDigest(size, dict(sorted((pieces.get(name, {}) | done.get(name, {})).items())), rest)
        for name, (size, rest) in rests.items()
    }


def _submit(part: Part, plan: Plan, staging: Staging, workers: Workers) -> Iterator[None]:
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


def _create(part: Part, staging: Staging, workers: Workers) -> Output:
    """Create a target file with all that is known now."""
    file = part.file
    output = workers.open(staging.create(file.name, file.size), part)
    with translate_os_errors(file.name):
        for offset, data in file.literals if part.is_owner else ():
            write_all(output.descriptor, memoryview(data), offset)
        for offset, length in file.zeros if not part.is_whole else ():  # of a file that was there before
            for start in range(offset, offset + length, _ZEROS):
                write_all(output.descriptor, memoryview(bytes(min(_ZEROS, offset + length - start))), start)
    return output
