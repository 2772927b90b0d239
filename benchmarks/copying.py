"""Copy with one thread per processor: `python -m benchmarks.copying SOURCE COPY [WHEN]`.

SOURCE is a folder, or a JSON list of spans: source, offset, name in COPY, offset there, length. WHEN tells when the
copy is synced: `after` (default), `meanwhile` by another thread, or `never`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

PART = 1 << 20  # larger buffers leave the processor's cache

Job = Callable[[memoryview], object]
#: A file, and an offset and a length in it.
Piece = tuple[int, int, int]


def main(source: str, copy: str, when: str = "after") -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.mkdir(copy)
    files: dict[str, int] = {}
    pieces: dict[int, list[Piece]] = {}
    for path, start, name, _, length in sorted(_spans(source, copy), key=lambda span: (span[2], span[3])):
        for key, flags in ((path, os.O_RDONLY), (f"{copy}/{name}", os.O_WRONLY | os.O_CREAT)):
            if key not in files:
                files[key] = os.open(key, flags)
        pieces.setdefault(files[f"{copy}/{name}"], []).append((files[path], start, length))
    run(_alternating([_jobs(file, parts) for file, parts in pieces.items()]), list(pieces), when)


def run(jobs: Iterable[Job], files: list[int], when: str = "after") -> None:
    """Run the jobs in threads, each with a buffer, and sync the files."""
    waiting, lock = iter(jobs), threading.Lock()
    written = threading.Event()

    def work() -> None:
        buffer = memoryview(bytearray(PART))
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            job(buffer)

    def sync() -> None:
        while not written.wait(0.01):
            for file in files:
                os.fdatasync(file)

    workers = [threading.Thread(target=work) for _ in range(os.cpu_count() or 1)]
    others = [threading.Thread(target=sync)] if when == "meanwhile" else []
    for thread in (*others, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    written.set()
    for thread in others:
        thread.join()
    if when != "never":
        for file in files:
            os.fsync(file)


def write(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def read(file: int, buffer: memoryview, at: int) -> None:
    while buffer:
        count = os.preadv(file, [buffer], at)
        assert count, "the file is too short"
        buffer, at = buffer[count:], at + count


def _spans(source: str, copy: str) -> Iterator[tuple[str, int, str, int, int]]:
    if os.path.isfile(source):
        with open(source) as file:
            yield from json.load(file)
        return
    for folder, folders, names in os.walk(source):
        inside = os.path.relpath(folder, source)
        for name in folders:
            os.mkdir(os.path.join(copy, inside, name))
        for name in names:
            path = os.path.join(folder, name)
            yield path, 0, os.path.join(inside, name), 0, os.path.getsize(path)


def _alternating(files: Sequence[Iterator[Job]]) -> Iterator[Job]:
    """Yield jobs of as many files in turn as there are threads, because Linux lets one thread write to a file."""
    count = os.cpu_count() or 1
    for first in range(0, len(files), count):
        for jobs in zip_longest(*files[first : first + count]):
            yield from filter(None, jobs)


def _jobs(file: int, pieces: list[Piece]) -> Iterator[Job]:
    """Yield jobs that each write one aligned part."""
    part: list[Piece] = []
    at, left = 0, PART
    for source, start, length in pieces:
        while length:
            count = min(length, left)
            part.append((source, start, count))
            start, length, left = start + count, length - count, left - count
            if not left:
                yield _copied(file, part, at)
                part, at, left = [], at + PART, PART
    if part:
        yield _copied(file, part, at)


def _copied(file: int, part: list[Piece], at: int) -> Job:
    def job(buffer: memoryview) -> None:
        end = 0
        for source, start, count in part:
            read(source, buffer[end : end + count], start)
            end += count
        write(file, buffer[:end], at)

    return job


if __name__ == "__main__":
    main(*sys.argv[1:])
