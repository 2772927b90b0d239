"""`ckpt/testing/stores.py`, `ckpt/stores/objects.py`: ckpt's own stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from ckpt.stores import objects
from ckpt.testing import Served, StoreConformance, StoreDeclaration
from tests.support.object_store import serve


@contextmanager
def s3(folder: Path) -> Iterator[Served]:
    """Serve an empty bucket with moto's S3 server."""
    with serve() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)

        client, bucket = server.client, f"runs-{uuid4().hex}"  # moto keeps one set of buckets per process
        client.create_bucket(Bucket=bucket)

        def put(key: str, content: bytes) -> None:
            client.put_object(Bucket=bucket, Key=key, Body=content)

        def get(key: str) -> bytes | None:
            try:
                found: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            except client.exceptions.NoSuchKey:
                return None
            return found

        yield Served(bucket, put, get, lambda key: client.delete_object(Bucket=bucket, Key=key))


@contextmanager
def memory(folder: Path) -> Iterator[Served]:
    """Serve a folder from fsspec's in-memory store, an example of a read-only store."""
    files, root = fsspec.filesystem("memory"), uuid4().hex
    patch = pytest.MonkeyPatch()
    patch.setattr(objects, "FIRST_WAIT", 0.001)

    def put(key: str, content: bytes) -> None:
        files.pipe_file(f"/{root}/{key}", content)

    try:
        yield Served(root, put, lambda key: files.cat_file(f"/{root}/{key}"), lambda key: files.rm(f"/{root}/{key}"))
    finally:
        patch.undo()
    with suppress(FileNotFoundError):
        files.rm(f"/{root}", recursive=True)


class TestStores(StoreConformance):
    declarations = (StoreDeclaration("s3", s3, part=5 << 20), StoreDeclaration("memory", memory, writes=False))
