"""Carry out a plan: the only code that moves tensor bytes.

What is copied in one go is in `blocks`, the threads that do it in `workers`.  Work goes in the order of the target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from ckpt.move.blocks import batches, write_all
from ckpt.move.filehash import max_pieces
from ckpt.move.files import Staging, check_destination, translate_os_errors
from ckpt.move.workers import MAX_UNFINISHED, FileDigests, Output, Progress, Resources, Workers
from ckpt.plan.checkpoint import TargetFile
from ckpt.plan.planner import Plan


def execute(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    resources: Resources | None = None,
    progress: Progress | None = None,
    hashing: bool = False,
    check: Callable[[], None] = lambda: None,
    describe: Callable[[Path, FileDigests], Mapping[str, bytes]] = lambda *_: {},
) -> None:
    """Write the plan's files and move them to `destination` when all of them are complete and durable.

    `progress` is called with numbers of bytes written, from several threads, one at a time.  `check` is called before
    the first byte is written, when the destination has been found good, and may raise.  `describe` is given the
    folder when it is filled, while it is still being synced, and where `hashing` the digests of all files in it; it
    returns the content of more files.  Raises StorageError for the disk's errors and CorruptError for a source that
    changed meanwhile; the destination is then as it was.
    """
    resources = resources or Resources()
    workers = Workers(resources, progress or (lambda _: None), max_pieces(len(plan.target.files)) if hashing else 0)
    for source in plan.checkpoint.files:  # which links may have led out of the checkpoint's own folder
        check_destination(destination, Path(source.path))
    with Staging(destination, overwrite=overwrite, total_bytes=plan.total_bytes) as staging:
        check()
        with workers:
            filling = (_submit(file, plan, staging, workers) for file in plan.target.files)
            _run_in_turn(filling, min(workers.num_fillers, MAX_UNFINISHED))
            workers.join(
                lambda: [
                    _create(TargetFile.of_bytes(name, content), staging, workers, is_hashed=False)
                    for name, content in describe(staging.path, workers.digests()).items()
                ]
            )
        for source in plan.checkpoint.files:
            with translate_os_errors(source.path):
                source.check_unchanged()
        staging.commit()


def _submit(file: TargetFile, plan: Plan, staging: Staging, workers: Workers) -> Iterator[None]:
    """Create a target file and hand out its copies, one batch at each step."""
    output = _create(file, staging, workers)
    for batch in batches(plan.spans(file), plan.copies(file), workers.buffer_size):
        workers.submit(output, batch)
        yield
    for name, copies in plan.computed_copies(file).items():
        workers.compute(output, copies, plan.checkpoint.computed[name])
        yield
    workers.finish(output)


def _run_in_turn(iterators: Iterator[Iterator[None]], number: int) -> None:
    """Let the first `number` iterators take a step each in turn; where one ends, the next takes its place."""
    end = object()
    running = deque(islice(iterators, number))
    while running:
        one = running.popleft()
        if next(one, end) is end:
            running.extend(islice(iterators, 1))
        else:
            running.append(one)


def _create(file: TargetFile, staging: Staging, workers: Workers, *, is_hashed: bool = True) -> Output:
    """Create a target file with all that is known now."""
    output = workers.open(staging.create(file.name, file.size), file, is_hashed=is_hashed)
    with translate_os_errors(file.name):
        for offset, data in file.literals:
            write_all(output.descriptor, memoryview(data), offset)
    return output
