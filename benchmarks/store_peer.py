"""Read everything below a prefix in parallel ranges: `python -m benchmarks.store_peer WHAT PREFIX OUTPUT`.

WHAT is a bare library that drops the bytes (`obstore`, `s3fs`), obstore writing them to the folder OUTPUT (`obstore
writes`), or ckpt with an open checkpoint (`hash`, `convert`). It prints the seconds from first to last range.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.store_server import BUCKET

PART, NUM_THREADS = 8 << 20, 8  # like ckpt

#: Key, start and stop.
Part = tuple[str, int, int]


def main() -> None:
    what, prefix, output = sys.argv[1:]
    transfer = _PREPARED[what](prefix, Path(output))
    # Late, because a virtual machine's host reclaims free memory.
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    transfer()
    print(time.perf_counter() - start)


def _obstore(prefix: str, output: Path) -> Callable[[], None]:
    sizes, get = _obstore_client(prefix)
    return partial(_read, sizes, lambda part: len(get(part)))


def _obstore_writes(prefix: str, output: Path, writing: AbstractContextManager[Any]) -> Callable[[], None]:
    sizes, get = _obstore_client(prefix)

    def copy(part: Part, files: dict[str, int]) -> int:
        data = memoryview(get(part))
        with writing:
            return os.pwrite(files[part[0]], data, part[1])

    def copy_all() -> None:
        output.mkdir()
        paths = {key: output / str(number) for number, key in enumerate(sizes)}
        files = {key: os.open(path, os.O_WRONLY | os.O_CREAT) for key, path in paths.items()}
        _read(sizes, partial(copy, files=files))

    return copy_all


def _obstore_client(prefix: str) -> tuple[dict[str, int], Callable[[Part], Any]]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True})
    sizes = {one["path"]: one["size"] for chunk in obstore.list(store, prefix) for one in chunk}
    return sizes, lambda part: obstore.get(store, part[0], options={"range": part[1:]}).bytes()


def _s3fs(prefix: str, output: Path) -> Callable[[], None]:
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    sizes = {name: info["size"] for name, info in files.find(f"{BUCKET}/{prefix}", detail=True).items()}
    return partial(_read, sizes, lambda part: len(files.cat_file(part[0], start=part[1], end=part[2])))


def _hash(prefix: str, output: Path) -> Callable[[], None]:
    from ckpt import api
    from ckpt.compare.digest import digests

    checkpoint = api.open(f"s3://{BUCKET}/{prefix}")
    return lambda: print(digests(checkpoint).whole)


def _convert(prefix: str, output: Path) -> Callable[[], None]:
    import ckpt.move.run  # noqa: F401, imported by the first conversion
    from ckpt import api

    conversion = api.plan(api.open(f"s3://{BUCKET}/{prefix}"), "hf")
    return lambda: print(conversion.run(output, manifest=False))


def _read(sizes: dict[str, int], take: Callable[[Part], int]) -> None:
    parts = [(key, at, min(size, at + PART)) for key, size in sizes.items() for at in range(0, size, PART)]
    assert parts
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert sum(pool.map(take, parts)) == sum(sizes.values())


_PREPARED: dict[str, Callable[[str, Path], Callable[[], None]]] = {
    "obstore": _obstore,
    "obstore writes": partial(_obstore_writes, writing=threading.Lock()),  # Linux lets one thread write to a file
    "obstore writes, no lock": partial(_obstore_writes, writing=nullcontext()),
    "s3fs": _s3fs,
    "hash": _hash,
    "convert": _convert,
}

if __name__ == "__main__":
    main()
