"""Copy with one thread per processor, then sync: `python -m benchmarks.copying SOURCE COPY`."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PART = 8 << 20


def main(source: Path, copy: Path) -> None:
    shutil.copytree(source, copy, copy_function=lambda a, b: Path(b).touch())
    paths = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    files = [(os.open(source / path, os.O_RDONLY), os.open(copy / path, os.O_WRONLY)) for path in paths]
    parts = [(a, b, at) for a, b in files for at in range(0, os.fstat(a).st_size, _PART)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda part: _write(part[1], os.pread(part[0], _PART, part[2]), part[2]), parts))
        list(pool.map(lambda pair: os.fsync(pair[1]), files))


def _write(file: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
