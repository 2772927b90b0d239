"""`ckpt/commands/push/push.py`, `ckpt/commands/merge_lora/merge.py`: from a store to the Hub without a disk copy.

An adapter is also merged into a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process
from tests.support.hub_server import HubServer
from tests.support.object_store import BUCKET, Faults, ObjectStore
from tests.support.places import FIXTURES

REPO = "org/name"


@pytest.fixture
def hub(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        running.configure(monkeypatch, tmp_path / "hf-home")
        yield running


def test_a_folder_in_a_store_is_pushed(hub: HubServer, store: ObjectStore, tmp_path: Path) -> None:
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "model")
    url = store.upload(tmp_path / "model", "pushed")
    store.faults = Faults(status=503, num_status=2)
    done = process("push", url, "--repo-id", REPO)
    assert done.code == 0, done.err
    tree = hub.tree(REPO)
    card = tree.pop("README.md").decode()
    assert tree == store.objects("pushed") and "model.safetensors" in tree
    assert f"ckpt push {url}" in card and f"verified: {len(tree) + 1} files" in done.err
    hub.uploads.clear()
    again = run_ckpt("push", url, "--repo-id", REPO)
    assert (again.code, hub.uploads.total()) == (0, 0), again.err
    store.put("pushed/config.json", b"{}")
    edited = run_ckpt("push", url, "--repo-id", REPO)
    assert edited.code == 4 and "does not match its own manifest" in edited.err, edited.err
    store.client.delete_object(Bucket=BUCKET, Key="pushed/ckpt-manifest.json")
    other = run_ckpt("push", url, "--repo-id", REPO)
    assert (other.code, hub.tree(REPO)["config.json"]) == (0, b"{}"), other.err


def test_a_folder_that_is_not_there_is_refused(hub: HubServer) -> None:
    done = run_ckpt("push", f"s3://{BUCKET}/nothing-here", "--repo-id", REPO)
    assert (done.code, "folder not found" in done.err, hub.repos) == (3, True, {}), done.err
    assert f"s3://{BUCKET}/nothing-here" in done.err


def test_an_upload_that_is_refused_says_how_to_go_on(hub: HubServer, store: ObjectStore, tmp_path: Path) -> None:
    ckpt.plan(ckpt.open(FIXTURES / "moe-zero3"), "hf").run(tmp_path / "model")
    url = store.upload(tmp_path / "model", "refused")
    hub.refuse = 0
    failed = run_ckpt("push", url, "--repo-id", REPO)
    assert failed.code == 7 and f"ckpt push {url} --repo-id {REPO}" in failed.err, failed.err
    hub.refuse, hub.corrupt = None, "model.safetensors"
    wrong = run_ckpt("push", url, "--repo-id", REPO)
    assert wrong.code == 4 and "differs from the pushed file" in wrong.err, wrong.err


def test_an_adapter_is_merged_into_a_store_and_pushed(hub: HubServer, store: ObjectStore, tmp_path: Path) -> None:
    run, url = FIXTURES / "lora-zero3", f"s3://{BUCKET}/merged"
    here = run_ckpt("merge-lora", run, "-o", tmp_path / "merged")
    assert here.code == 0, here.err
    done = run_ckpt("merge-lora", run, "-o", url, "--push", "--repo-id", REPO)
    assert done.code == 0, done.err
    merged = store.objects("merged")
    assert merged["model.safetensors"] == (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert hub.tree(REPO) == merged and "README.md" in merged
    taken = run_ckpt("merge-lora", run, "-o", url)
    assert (taken.code, "the destination exists" in taken.err) == (2, True), taken.err
