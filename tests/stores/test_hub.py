"""`ckpt/runs/from_hub.py`, `ckpt/stores/placeholder_files.py`: `hf://org/name` reads a Hub repository in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt import api
from ckpt.commands.push import push
from ckpt.errors import NotFoundError, StorageError
from ckpt.stores import objects, ranges
from tests.support.commands import ckpt as command
from tests.support.hub_server import File, HubServer, Repo
from tests.support.places import FIXTURES


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        running.configure(monkeypatch, tmp_path / "hf-home")
        monkeypatch.setattr(objects, "FIRST_WAIT", 0.001)
        objects.store.cache_clear()
        yield running
        objects.store.cache_clear()


def test_a_repository(hub: HubServer, tmp_path: Path) -> None:
    content = b"\0" * (4 << 20)
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "model")
    files = {path.name: File(path.read_bytes(), False) for path in (tmp_path / "model").iterdir()}
    files["original/consolidated.pth"] = File(content, True)
    hub.repos["org/name"] = Repo(False, {"main": files})
    there, here = ckpt.open("hf://org/name"), ckpt.open(tmp_path / "model")
    assert api.digests(there) == api.digests(here)
    assert api.verify(there, here).equal
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"].content)  # it is small, and read once
    assert hub.sent["original/consolidated.pth"] == 0
    done = command("convert", "hf", "hf", "hf://org/name", "-o", tmp_path / "out", "-q")
    assert (done.code, done.out.strip()) == (0, str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == files["model.safetensors"].content
    assert command("inspect", "hf://org/name@main").out.startswith("path        hf://org/name@main\n")


def test_what_is_read_is_one_commit(hub: HubServer, tmp_path: Path) -> None:
    """A commit to the repository in the meantime must not mix with the old one."""
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "model")
    files = {path.name: File(path.read_bytes(), False) for path in (tmp_path / "model").iterdir()}
    hub.repos["org/name"] = Repo(False, {"main": files})
    conversion = ckpt.plan(ckpt.open("hf://org/name"), "hf")
    hub.repos["org/name"].branches["main"]["another"] = File(b"file", False)
    objects_before = sorted(tmp_path.iterdir())
    ranges.forget()
    # this server keeps no old commit
    with pytest.raises(NotFoundError, match=r"unknown branch, tag or commit\n.*hf://org/name/model\.safetensors"):
        conversion.run(tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == objects_before


def test_what_is_not_there(hub: HubServer) -> None:
    with pytest.raises(NotFoundError, match="no such repository"):
        ckpt.open("hf://org/missing")
    hub.repos["org/empty"] = Repo(False)
    with pytest.raises(NotFoundError, match=r"no such file or folder\n.*hf://org/empty"):
        ckpt.open("hf://org/empty")


@pytest.mark.parametrize("silent", [".*/models/.*", ".*/tree/.*", ".*/resolve/.*"])
def test_a_hub_that_says_nothing_is_not_waited_for_for_ever(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr(objects, "_SILENCE", 0.05)
    monkeypatch.setattr("time.sleep", lambda _: None)
    files = {"model.safetensors": File(b"\0" * 100, False)}
    hub.repos["org/name"], hub.silent = Repo(False, {"main": files}), silent
    with pytest.raises(StorageError, match=r"the store could not be used\n.*hf://org/name"):
        ckpt.open("hf://org/name")


@pytest.mark.parametrize("silent", ["POST .*/create", ".*/tree/.*", ".*/preupload/.*", ".*/commit/.*"])
def test_a_push_to_a_hub_that_says_nothing_ends(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: str
) -> None:
    monkeypatch.setattr(push, "_SILENCE", 0.2)
    monkeypatch.setattr("time.sleep", lambda _: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    hub.silent = silent
    with pytest.raises(StorageError, match=r"did not come to its end[^$]*ckpt push .* continues"):
        push.push(tmp_path / "model", push.Push("me/model"))
    hub.silent = None
    hub.ended.set()
    assert push.push(tmp_path / "model", push.Push("me/model")).num_files == 1
