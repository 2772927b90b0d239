"""Conformance suite for stores. Objects are written and checked with the store's own tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

import ckpt
from ckpt.base.errors import CkptError, CorruptError, NotFoundError, StorageError, UsageError
from ckpt.stores.objects import Entry, Store, WritableStore, store


class Served(NamedTuple):
    """An empty store: the text after `scheme://` in its URLs, and functions for objects that bypass ckpt.

    `get` returns None for a missing object.
    """

    root: str
    put: Callable[[str, bytes], None]
    get: Callable[[str], bytes | None]
    remove: Callable[[str], None]


@dataclass(frozen=True)
class StoreDeclaration:
    """A store for URLs with one `scheme`. `serve` creates an empty one for the life of its context.

    `part` is the store's minimum part size in bytes for multipart uploads. `writes` is True for a `WritableStore`.
    """

    scheme: str
    serve: Callable[[Path], AbstractContextManager[Served]]
    part: int = 1 << 10
    writes: bool = True


class _Opened(NamedTuple):
    served: Served
    store: Store
    url: str
    part: int


class StoreConformance:
    """Conformance suite for stores. Subclass it in a test module and set `declarations`."""

    declarations: ClassVar[Sequence[StoreDeclaration]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "declaration" in metafunc.fixturenames:
            wanted = [one for one in self.declarations if one.writes or "writable" not in metafunc.fixturenames]
            metafunc.parametrize("declaration", wanted, ids=lambda one: one.scheme)

    @pytest.fixture
    def opened(self, declaration: StoreDeclaration, tmp_path: Path) -> Iterator[_Opened]:
        with declaration.serve(tmp_path) as served:
            store.cache_clear()
            url = f"{declaration.scheme}://{served.root}"
            yield _Opened(served, store(declaration.scheme, served.root), url, declaration.part)
            store.cache_clear()

    @pytest.fixture
    def writable(self, opened: _Opened) -> WritableStore:
        assert isinstance(opened.store, WritableStore)
        return opened.store

    def test_a_folder_lists_what_is_in_it_and_nothing_else(self, opened: _Opened) -> None:
        objects = {
            "run/a.bin": b"abc",
            "run/deep/er/b.bin": b"",
            "run/with space & plus+.bin": b"1",
            "run/名前.bin": b"22",
            "run-2/c.bin": b"of a folder whose name begins alike",
            "top.bin": b"4",
        }
        for key, content in objects.items():
            opened.served.put(key, content)
        listed = {entry.key: entry.size for entry in opened.store.below("run")}
        assert listed == {key: len(content) for key, content in objects.items() if key.startswith("run/")}
        assert {entry.key for entry in opened.store.below("")} == objects.keys()
        directly = {entry.key for entry in opened.store.directly_in("run")}
        assert directly == {"run/a.bin", "run/with space & plus+.bin", "run/名前.bin"}
        assert [entry.key for entry in opened.store.directly_in("")] == ["top.bin"]

    def test_an_empty_folder_lists_nothing_or_is_not_found(self, opened: _Opened) -> None:
        opened.served.put("other/a.bin", b"abc")
        with suppress(NotFoundError):
            assert list(opened.store.below("run")) == []

    def test_a_range_is_read_exactly(self, opened: _Opened) -> None:
        content = bytes(range(256)) * 40
        opened.served.put("run/a.bin", content)
        (entry,) = opened.store.below("run")
        for start, stop in ((0, len(content)), (0, 1), (1, 300), (len(content) - 1, len(content)), (4096, 8192)):
            assert bytes(opened.store.read(entry, start, stop)) == content[start:stop]

    def test_an_object_that_was_replaced_is_not_mixed_with_the_one_that_was_listed(self, opened: _Opened) -> None:
        opened.served.put("run/a.bin", b"old content")
        (entry,) = opened.store.below("run")
        opened.served.put("run/a.bin", b"new content")
        try:
            read = bytes(opened.store.read(entry, 0, entry.size))
        except CorruptError:
            return
        assert read == b"old content", "a store of versions gives the one that was listed"

    def test_an_object_that_has_gone_is_an_error(self, opened: _Opened) -> None:
        opened.served.put("run/a.bin", b"content")
        (entry,) = opened.store.below("run")
        opened.served.remove("run/a.bin")
        with pytest.raises((CorruptError, NotFoundError, StorageError)):
            opened.store.read(entry, 0, entry.size)

    def test_a_checkpoint_there_is_the_one_on_the_disk(self, opened: _Opened, tmp_path: Path) -> None:
        for name, content in _model_files().items():
            opened.served.put(f"run/{name}", content)
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / name).write_bytes(content)
        there, here = ckpt.open(f"{opened.url}/run"), ckpt.open(tmp_path / "model")
        assert {fqn for fqn, _ in there.tensors} == {"a", "b"}
        assert ckpt.verify(there, here).equal

    @pytest.mark.parametrize("num_parts", [0, 1, 3])
    def test_an_object_arrives_whole(self, opened: _Opened, writable: WritableStore, num_parts: int) -> None:
        content = bytes(range(256)) * (opened.part // 256) * num_parts + b"end" * bool(num_parts)
        writable.put("run/a.bin", _chunks(content, opened.part), len(content), opened.part)
        assert opened.served.get("run/a.bin") == content
        assert [(entry.key, entry.size) for entry in writable.below("run")] == [("run/a.bin", len(content))]

    @pytest.mark.parametrize("num_parts", [1, 3])
    def test_an_object_whose_bytes_fail_is_not_there(
        self, opened: _Opened, writable: WritableStore, num_parts: int
    ) -> None:
        def failing() -> Iterator[memoryview]:
            yield memoryview(bytes(opened.part))
            raise StorageError("the source failed")

        with pytest.raises(CkptError, match="the source failed"):
            writable.put("run/a.bin", failing(), opened.part * num_parts, opened.part)
        assert opened.served.get("run/a.bin") is None

    def test_a_claim_is_one_process_alone(self, opened: _Opened, writable: WritableStore) -> None:
        assert writable.claim("run/claim")
        assert not writable.claim("run/claim")
        writable.remove("run/claim")
        assert opened.served.get("run/claim") is None
        assert writable.claim("run/claim")

    def test_an_object_that_is_not_there_can_be_removed(self, writable: WritableStore) -> None:
        writable.remove("run/nothing")

    def test_a_conversion_writes_what_it_writes_on_a_disk(
        self, opened: _Opened, writable: WritableStore, tmp_path: Path
    ) -> None:
        (tmp_path / "model").mkdir()
        for name, content in _model_files().items():
            (tmp_path / "model" / name).write_bytes(content)
        plan = ckpt.plan(ckpt.open(tmp_path / "model"), "hf")
        plan.run(f"{opened.url}/out")
        plan.run(tmp_path / "out")
        for path in (tmp_path / "out").iterdir():
            assert opened.served.get(f"out/{path.name}") == path.read_bytes(), path.name
        left = {entry.key for entry in writable.below("out")} - {f"out/{p.name}" for p in (tmp_path / "out").iterdir()}
        assert left == set(), "what says that it is being written is removed"
        with pytest.raises(UsageError, match="the destination exists"):
            plan.run(f"{opened.url}/out")


def _chunks(content: bytes, part: int) -> Iterator[memoryview]:
    yield from (memoryview(content)[at : at + part] for at in range(0, len(content), part))


def _model_files() -> dict[str, bytes]:
    header: dict[str, object] = {
        "a": {"dtype": "F32", "shape": [300], "data_offsets": [0, 1200]},
        "b": {"dtype": "U8", "shape": [2, 3], "data_offsets": [1200, 1206]},
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(range(200)) * 6 + b"abcdef"
    return {"model.safetensors": content}


__all__ = ["Entry", "Served", "Store", "StoreConformance", "StoreDeclaration", "WritableStore"]
