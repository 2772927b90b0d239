"""`python -m benchmarks.store_peer LIBRARY PREFIX`: reads all below a prefix in ranges, side by side, and drops it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.store_server import BUCKET

PART, NUM_THREADS = 4 << 20, 8  # as ckpt does


def main() -> None:
    library, prefix = sys.argv[1:]
    sys.exit(_READ[library](prefix) == 0)


def _obstore(prefix: str) -> int:
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True})
    sizes = {one["path"]: one["size"] for chunk in obstore.list(store, prefix) for one in chunk}

    def read(part: tuple[str, int, int]) -> int:
        answer: Any = obstore.get(store, part[0], options={"range": part[1:]})
        return len(answer.bytes())

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(read, _parts(sizes)))


def _s3fs(prefix: str) -> int:
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    sizes = {name: info["size"] for name, info in files.find(f"{BUCKET}/{prefix}", detail=True).items()}

    def read(part: tuple[str, int, int]) -> int:
        return len(files.cat_file(part[0], start=part[1], end=part[2]))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(read, _parts(sizes)))


def _parts(sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    return [(key, at, min(size, at + PART)) for key, size in sizes.items() for at in range(0, size, PART)]


_READ = {"obstore": _obstore, "s3fs": _s3fs}

if __name__ == "__main__":
    main()
