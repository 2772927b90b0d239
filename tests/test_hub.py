"""Pushing to a server on the loopback that speaks the Hub's protocol, through huggingface_hub as users run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt import api, hub
from ckpt.checkpoint import Layout
from ckpt.errors import UsageError
from tests.commands import process
from tests.engines import REPOSITORY
from tests.hub_server import LARGE, TOKEN, HubServer

FIXTURES = REPOSITORY / "fixtures"
REPO = "me/merged"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # Xet's own storage protocol is not what this server speaks
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of several files, large ones and small ones."""
    output = tmp_path / "model"
    api.plan(api.open(FIXTURES / "lora-zero3"), "hf", Layout(max_shard_size=2500)).run(output)
    assert sum(path.stat().st_size >= LARGE for path in output.iterdir()) >= 3
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_push_and_push_again(server: HubServer, folder: Path) -> None:
    before = contents(folder)
    server.drop = 1  # the library tries once more
    first = process("push", folder, "--repo-id", REPO, "--private", "--commit-message", "Weights")
    assert first.code == 0, first.err
    tree = server.tree(REPO)
    card = tree.pop("README.md").decode()
    assert tree == before == contents(folder)
    assert api.digests(api.open(folder)).whole["weights"] in card and "ckpt push" in card and card.startswith("---\n")
    assert server.repos[REPO].private and server.repos[REPO].messages == ["Weights", "Weights: model card"]
    assert f"verified: {len(tree) + 1} files" in first.err and "/commit/" in first.out
    server.uploads.clear()
    second = process("push", folder, "--repo-id", REPO, "--json", "-q")
    assert second.code == 0, second.err
    assert json.loads(second.out)["files"] == len(tree)
    assert not server.uploads and len(server.repos[REPO].messages) == 2


def test_a_branch_and_a_pull_request(server: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text("---\ntags: [mine]\n---\nmy own card\n")
    branch = process("push", folder, "--repo-id", REPO, "--revision", "v1")
    assert branch.code == 0, branch.err
    assert server.tree(REPO, "v1") == contents(folder) and server.tree(REPO) == {}
    request = process("push", folder, "--repo-id", REPO, "--create-pr")
    assert request.code == 0, request.err
    assert "/discussions/2" in request.out
    assert server.tree(REPO, "refs/pr/2") == contents(folder) and server.tree(REPO) == {}


def test_refused_midway_and_resumed(server: HubServer, folder: Path) -> None:
    server.refuse = 3
    before = contents(folder)
    failed = process("push", folder, "--repo-id", REPO)
    assert failed.code == 7 and "Traceback" not in failed.err
    assert (
        "the push did not come to its end" in failed.err
        and f"ckpt push {folder} --repo-id {REPO}` goes on" in failed.err
    )
    assert contents(folder) == before and server.tree(REPO) == {}
    server.refuse = None
    arrived = set(server.blobs)
    assert arrived
    server.uploads.clear()
    resumed = process("push", folder, "--repo-id", REPO)
    assert resumed.code == 0, resumed.err
    assert server.uploads and not arrived & set(server.uploads)
    assert {name: server.tree(REPO)[name] for name in before} == before


def test_killed_midway_and_resumed(server: HubServer, folder: Path) -> None:
    server.hold = threading.Event()
    command = [sys.executable, "-m", "ckpt", "push", str(folder), "--repo-id", REPO]
    running = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (server.uploads.total() > 1 and (server.blobs or server.parts)) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.kill()
    running.wait()
    assert server.tree(REPO) == {}
    server.hold.set()
    server.hold = None
    resumed = process("push", folder, "--repo-id", REPO)
    assert resumed.code == 0, resumed.err
    tree = server.tree(REPO)
    assert {name: tree[name] for name in contents(folder)} == contents(folder)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-*.safetensors"])
def test_a_wrong_checksum_is_found(server: HubServer, folder: Path, name: str) -> None:
    (path,) = folder.glob(name)
    server.corrupt = path.name
    report = process("push", folder, "--repo-id", REPO)
    assert report.code == 4, report.err
    assert "a file on the Hub is not the one that was pushed" in report.err and path.name in report.err


def test_not_let_in(server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    report = process("push", folder, "--repo-id", REPO)
    assert report.code == 7 and "HF_TOKEN" in report.err and "Traceback" not in report.err


def test_nobody_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = process("push", folder, "--repo-id", REPO)
    assert report.code == 7 and "Traceback" not in report.err


@pytest.mark.parametrize(
    "to", [{"repo_id": "noslash"}, {"repo_id": "a/b/c"}, {"repo_id": REPO, "create_pr": True, "revision": "v1"}]
)
def test_what_cannot_be_meant(to: dict) -> None:
    with pytest.raises(UsageError):
        hub.Push(**to)


def test_the_repository_that_a_run_records(tmp_path: Path) -> None:
    """`hub_model_id` of the real training arguments of transformers, read without running anything."""
    import torch
    from transformers import TrainingArguments

    step = tmp_path / "checkpoint-3"
    step.mkdir()
    with pytest.raises(UsageError, match="to which repository"):
        hub.recorded_repo([step])
    torch.save(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), step / "training_args.bin")
    with pytest.raises(UsageError, match="to which repository") as error:
        hub.recorded_repo([step])
    assert "--repo-id" in str(error.value)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], hub_model_id="me/my-run")
    torch.save(arguments, tmp_path / "training_args.bin")
    assert hub.recorded_repo([step]) == "me/my-run"
    assert hub.recorded_repo([tmp_path]) == "me/my-run"


def test_merge_and_push_from_a_run_folder(server: HubServer, tmp_path: Path) -> None:
    """Nothing is given but `--push`: the adapter, the base and the repository are what the run records."""
    import torch
    from transformers import TrainingArguments

    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "lora-zero3", run)
    asking = process("merge-lora", "--push", cwd=run)
    assert asking.code == 2 and "to which repository" in asking.err and "--repo-id ORG/NAME" in asking.err
    arguments = TrainingArguments(str(run), use_cpu=True, report_to=[], hub_model_id=REPO)
    torch.save(arguments, run / "training_args.bin")
    server.refuse = 0
    failed = process("merge-lora", "--push", cwd=run)
    merged = tmp_path / "run-merged"
    assert failed.code == 7 and f"ckpt push {merged} --repo-id {REPO}" in failed.err
    server.refuse = None
    resumed = process("push", merged, "--repo-id", REPO)
    assert resumed.code == 0, resumed.err
    assert server.tree(REPO) == contents(merged)
    card = (merged / "README.md").read_text()
    assert "ckpt merge-lora --push" in card and api.digests(api.open(merged)).whole["weights"] in card
    again = process("merge-lora", ".", "--push", "--overwrite", "--json", cwd=run)
    assert again.code == 0, again.err
    assert json.loads(again.out)["pushed"]["repo_id"] == REPO


def test_options_of_a_push_without_it(tmp_path: Path) -> None:
    report = process("merge-lora", FIXTURES / "lora-zero3", "-o", tmp_path / "out", "--repo-id", REPO)
    assert report.code == 2 and "go with --push" in report.err
