"""`xxhsum -H2` or `b3sum` over every file in a folder, or the tool's Python library if the tool is missing.

python -m benchmarks.hash_peer xxhsum|b3sum FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_CHUNK = 1 << 20


def is_installed(name: str) -> bool:
    return shutil.which(name) is not None


def has_library(name: str) -> bool:
    return find_spec(ALGORITHMS[name].library) is not None


def _xxh3_128(path: Path) -> str:
    from xxhash import xxh3_128

    hasher = xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def _blake3(path: Path) -> str:
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


class Algorithm(NamedTuple):
    options: list[str]
    library: str
    digest: Callable[[Path], str]


ALGORITHMS = {
    "xxhsum": Algorithm(["-H2"], "xxhash", _xxh3_128),
    "b3sum": Algorithm([], "blake3", _blake3),
}


def main(name: str, folder: Path) -> None:
    algorithm = ALGORITHMS[name]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if is_installed(name):
        os.execlp(name, name, *algorithm.options, *map(str, files))
    for path in files:
        print(f"{algorithm.digest(path)}  {path}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
