"""A store on the loopback, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt.stores import objects
from tests.support.object_store import Faults, ObjectStore, serve


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectStore]:
    with serve() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Yield the server without faults, configured by AWS's own variables, with short retry delays."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.001)
    monkeypatch.setitem(objects.RETRIES["backoff"], "init_backoff", objects.timedelta(milliseconds=1))
    monkeypatch.setitem(objects.RETRIES["backoff"], "max_backoff", objects.timedelta(milliseconds=10))
    objects.store.cache_clear()
    server.faults = Faults()
    server.requests.clear()
    yield server
    server.faults = Faults()
    objects.store.cache_clear()
