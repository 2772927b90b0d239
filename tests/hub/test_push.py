"""`ckpt/commands/push/push.py`, `pushing.py`, `card.py`, `recorded_repo.py`: push to a Hub server on loopback.

The upload goes through huggingface_hub, like a user's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from ckpt import api
from ckpt.commands.push import push as hub
from ckpt.commands.push import pushing
from ckpt.commands.push.card import model_card
from ckpt.commands.push.recorded_repo import recorded_repo
from ckpt.errors import UsageError
from ckpt.plan.checkpoint import Layout
from converters.names.hub import save_pretrained
from tests.support.commands import Result, ckpt, process
from tests.support.hub_server import LARGE, File, HubServer, Repo
from tests.support.places import FIXTURES, REPOSITORY

REPO = "me/merged"
Run = Callable[..., Result]

#: The library sends large files through Xet's store if hf_xet is installed (the usual case), else through the LFS
#: interface.
both_ways = pytest.mark.parametrize("server", ["xet", "lfs"], indirect=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a Hugging Face folder with several large and small files."""
    output = tmp_path / "model"
    api.plan(api.open(FIXTURES / "lora-zero3"), "hf", Layout(max_shard_size=2500, names="own")).run(
        output, manifest=False
    )
    config = json.loads((output / "config.json").read_text())
    # without expected names: the model has adapters
    (output / "config.json").write_text(json.dumps(config | {"model_type": None, "architectures": None}))
    assert sum(path.stat().st_size >= LARGE for path in output.iterdir()) >= 3
    return output


@pytest.fixture
def run(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function for `ckpt`: with Xet in a new process, because hf_xet has one server in a process."""

    def run(*words: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, words)])  # for the card
        return (ckpt if "HF_HUB_DISABLE_XET" in os.environ else process)(*words)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_push_from_python(server: HubServer, folder: Path) -> None:
    code = "import sys, ckpt; done = ckpt.push(*sys.argv[1:], private=True, say=print); print(repr(done), done)"
    done = process(folder, REPO, script=code)
    assert done.code == 0, done.err
    tree = server.tree(REPO)
    assert f'import ckpt; ckpt.push("{folder}", "{REPO}")' in tree.pop("README.md").decode()
    assert tree == contents(folder) and server.repos[REPO].private
    *_, said, shown = done.out.splitlines()
    assert said.startswith(f"verified: {len(tree) + 1} files") and shown.startswith(f"<{REPO}: {len(tree) + 1} files, ")
    with pytest.raises(UsageError, match=r"to which repository(.|\n)*give it with repo_id='ORG/NAME'"):
        pushing.push(folder)
    with pytest.raises(UsageError, match="invalid Hub repository\n  expected: ORG/NAME\n  found: name"):
        pushing.push(folder, "name")


@both_ways
def test_push_and_push_again(server: HubServer, folder: Path, run: Run) -> None:
    before = contents(folder)
    server.drop = 1  # the library tries once more
    first = run("push", folder, "--repo-id", REPO, "--private", "--commit-message", "Weights")
    assert first.code == 0, first.err
    tree = server.tree(REPO)
    card = tree.pop("README.md").decode()
    assert tree == before == contents(folder)
    assert api.digests(api.open(folder)).whole["weights"] in card and "ckpt push" in card and card.startswith("---\n")
    assert server.repos[REPO].private and server.repos[REPO].messages == ["Weights", "Weights: model card"]
    assert f"verified: {len(tree) + 1} files" in first.err and "/commit/" in first.out
    server.uploads.clear()
    second = ckpt("push", folder, "--repo-id", REPO, "--json", "-q")
    assert second.code == 0, second.err
    assert json.loads(second.out)["files"] == len(tree)
    assert not server.uploads and len(server.repos[REPO].messages) == 2


@both_ways
def test_a_branch_and_a_pull_request(server: HubServer, folder: Path, run: Run) -> None:
    (folder / "README.md").write_text("---\ntags: [mine]\n---\nmy own card\n")
    branch = run("push", folder, "--repo-id", REPO, "--revision", "v1")
    assert branch.code == 0, branch.err
    assert server.tree(REPO, "v1") == contents(folder) and server.tree(REPO) == {}
    request = run("push", folder, "--repo-id", REPO, "--create-pr")
    assert request.code == 0, request.err
    assert "/discussions/1" in request.out
    assert server.tree(REPO, "refs/pr/1") == contents(folder) and server.tree(REPO) == {}


@pytest.mark.parametrize(
    ("server", "options", "again"),
    [
        ("xet", ["--revision", "v1", "--private"], "--revision v1 --private"),
        ("lfs", ["--create-pr"], "--revision refs/pr/1"),
    ],
    indirect=["server"],
)
def test_going_on_at_the_same_place(server: HubServer, folder: Path, run: Run, options: list[str], again: str) -> None:
    """The command in the error continues on the same branch or in the open pull request."""
    server.refuse = 0
    failed = run("push", folder, "--repo-id", REPO, *options)
    command = f"ckpt push {folder} --repo-id {REPO} {again}"
    assert failed.code == 7 and f"`{command}` continues" in failed.err
    server.refuse = None
    resumed = ckpt(*command.split()[1:])
    assert resumed.code == 0, resumed.err
    branch = again.split()[1]
    assert {name: server.tree(REPO, branch)[name] for name in contents(folder)} == contents(folder)
    assert server.tree(REPO) == {} and len(server.repos[REPO].pull_requests) == ("--create-pr" in options)
    assert server.repos[REPO].private == ("--private" in options)


@pytest.mark.parametrize("server", ["lfs"], indirect=True)
def test_refused_midway_and_resumed(server: HubServer, folder: Path) -> None:
    server.refuse = 3
    before = contents(folder)
    failed = ckpt("push", folder, "--repo-id", REPO)
    assert failed.code == 7 and "Traceback" not in failed.err
    assert "the push did not come to its end" in failed.err and "413" in failed.err
    assert f"ckpt push {folder} --repo-id {REPO}` continues" in failed.err
    assert contents(folder) == before and server.tree(REPO) == {}
    server.refuse = None
    arrived = set(server.blobs)
    assert arrived
    server.uploads.clear()
    resumed = ckpt("push", folder, "--repo-id", REPO)
    assert resumed.code == 0, resumed.err
    assert server.uploads and not arrived & set(server.uploads)
    assert {name: server.tree(REPO)[name] for name in before} == before


@both_ways
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_midway_and_resumed(server: HubServer, folder: Path, run: Run, how: signal.Signals) -> None:
    server.hold = threading.Event()
    command = [sys.executable, "-m", "ckpt", "push", str(folder), "--repo-id", REPO]
    running = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not server.uploads and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(how)
    time.sleep(0.5)
    assert server.tree(REPO) == {}
    server.hold.set()  # lets the library's threads finish
    said = running.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert running.returncode == 130 and "Traceback" not in said
        assert f"interrupted; the local folder is unchanged; `ckpt push {folder} --repo-id {REPO}` continues" in said
    assert server.tree(REPO) == {}
    server.hold = None
    resumed = run("push", folder, "--repo-id", REPO)
    assert resumed.code == 0, resumed.err
    tree = server.tree(REPO)
    assert {name: tree[name] for name in contents(folder)} == contents(folder)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-*.safetensors"])
def test_a_wrong_checksum_is_found(server: HubServer, folder: Path, name: str) -> None:
    (path,) = folder.glob(name)
    server.corrupt = path.name
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 4, report.err
    assert "a file on the Hub differs from the pushed file" in report.err and path.name in report.err


@pytest.mark.parametrize("token", ["hf_other", None])
def test_not_let_in(server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 7 and "Traceback" not in report.err
    assert "the Hub needs a token for pushing" in report.err and "set HF_TOKEN" in report.err


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ("POST /api/repos/create", 403, "does not let this token push here"),
        (r"POST /api/models/.*/commit/main", 403, "does not let this token push here"),
        (r"POST /api/models/.*/preupload/main", 404, "repository or branch not found on the Hub"),
        (r"POST /api/models/.*/commit/main", 409, "somebody else is changing the repository"),
        (r"POST /api/models/.*/commit/main", 412, "somebody else is changing the repository"),
    ],
)
def test_what_the_hub_refuses(server: HubServer, folder: Path, request_: str, status: int, said: str) -> None:
    server.status[request_] = status
    before = contents(folder)
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 7 and said in report.err and "Traceback" not in report.err
    assert f"you get {status}" in report.err or str(status) in report.err
    assert f"ckpt push {folder} --repo-id {REPO}` continues" in report.err and contents(folder) == before


def test_without_a_network_the_reason_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        report = process("push", folder, "--repo-id", REPO)
    assert (report.code, report.err.count("Connection refused")) == (7, 1), report.err


def test_a_repository_of_others_that_takes_pull_requests(server: HubServer, folder: Path) -> None:
    """Users without permission to create a repository may still open a pull request in it."""
    server.repos[REPO] = Repo(private=False)
    server.status["POST /api/repos/create"] = 403
    report = ckpt("push", folder, "--repo-id", REPO, "--create-pr")
    assert report.code == 0, report.err
    assert set(contents(folder)) < set(server.tree(REPO, "refs/pr/1"))


def test_names_that_are_not_those_of_the_config(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_pretrained, "is_available", lambda: False)  # the table is enough
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused = ckpt("push", folder, "--repo-id", REPO)
    assert refused.code == 6 and "names or shapes don't match LlamaForCausalLM's save_pretrained" in refused.err
    assert "too many: base_model.model." in refused.err and "--names own" in refused.err
    assert REPO not in server.repos
    assert hub.Push(REPO, own_names=True).again(folder).endswith(f"--repo-id {REPO} --names own` continues")
    pushed = ckpt("push", folder, "--repo-id", REPO, "--names", "own")
    assert pushed.code == 0, pushed.err
    assert {name: server.tree(REPO)[name] for name in contents(folder)} == contents(folder)


def test_files_that_appear_during_a_push_are_not_pushed(server: HubServer, folder: Path) -> None:
    """A trainer may write its optimizer into the folder after the check for training state."""
    before, said = contents(folder), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("pushing "):
            for name in ("optimizer.pt", ".env"):
                (folder / name).write_text("secret")

    done = pushing.push(folder, REPO, say=say)
    tree = server.tree(REPO)
    assert tree.pop("README.md") and tree == before and done.num_files == len(tree) + 1
    assert "note: not pushed, new since the push began: optimizer.pt" in said


def test_shards_without_an_index_are_refused(server: HubServer, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    refused = ckpt("push", folder, "--repo-id", REPO)
    assert refused.code == 6 and REPO not in server.repos
    assert "from_pretrained cannot load this folder: model.safetensors.index.json is missing" in refused.err
    pushed = ckpt("push", folder, "--repo-id", REPO, "--names", "own")
    assert pushed.code == 0, pushed.err
    assert {name: server.tree(REPO)[name] for name in contents(folder)} == contents(folder)


def test_no_repository_is_left_with_an_adapter_and_a_model(server: HubServer, folder: Path, tmp_path: Path) -> None:
    """Loaders would pick PEFT's adapter and ignore the model, so the repository stays unchanged."""
    server.repos[REPO] = Repo(private=False)
    there = server.repos[REPO].branches["main"]
    there["adapter_config.json"] = File(b"{}", False)
    there["config.json"] = File(b"{}", False)  # Axolotl saves it beside an adapter
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 2 and "holds an adapter, and you push a model" in report.err
    assert "--repo-id" in report.err and not server.uploads and len(there) == 2
    report = ckpt("push", folder, "--repo-id", REPO, "--revision", "merged")
    assert report.code == 2 and len(there) == 2  # a new branch begins with the main branch's files
    del server.repos[REPO].branches["merged"]
    adapter = tmp_path / "adapter"
    api.plan(api.open(FIXTURES / "lora-zero3"), "peft").run(adapter)
    server.repos[REPO].branches["main"] = {"model-00001-of-00002.safetensors": File(b"older", True)}
    report = ckpt("push", adapter, "--repo-id", REPO)
    assert report.code == 2 and "holds a model, and you push an adapter" in report.err
    assert len(server.tree(REPO)) == 1 and not server.uploads


def test_a_card_of_others_is_never_replaced(server: HubServer, folder: Path) -> None:
    server.repos[REPO] = Repo(private=False)
    there = server.repos[REPO].branches["main"]
    there["README.md"] = File(b"---\ntags: [mine]\n---\nmy evaluation of three weeks\n", False)
    (folder / "README.md").write_text("---\ntags: [ckpt]\n---\nanother card\n")
    before = there["README.md"]
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 0 and "kept the README.md in me/merged" in report.err
    assert there["README.md"] == before
    assert set(server.tree(REPO)) == set(contents(folder))
    ours = model_card("merged", {}, {"weights": "0"}, ["ckpt", "push"]).encode()
    there["README.md"] = File(ours, False)
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 0 and "stays" not in report.err
    assert server.tree(REPO) == contents(folder)


def test_a_file_that_the_hub_leaves_out(server: HubServer, folder: Path) -> None:
    server.ignored = "generation_config.json"
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 4 and "did not arrive" in report.err and ".gitignore" in report.err
    assert "generation_config.json" in report.err


def test_nobody_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 7 and "Traceback" not in report.err


@pytest.mark.parametrize(
    "to", [{"repo_id": "noslash"}, {"repo_id": "a/b/c"}, {"repo_id": REPO, "create_pr": True, "revision": "v1"}]
)
def test_what_cannot_be_meant(to: dict) -> None:
    with pytest.raises(UsageError):
        hub.Push(**to)


def test_the_repository_that_a_run_records(tmp_path: Path) -> None:
    """Read `hub_model_id` from real transformers training arguments, without running code."""
    import torch
    from transformers import TrainingArguments

    step = tmp_path / "checkpoint-3"
    step.mkdir()
    with pytest.raises(UsageError, match=r"to which repository"):
        recorded_repo([step])
    torch.save(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), step / "training_args.bin")
    with pytest.raises(UsageError, match=r"to which repository") as error:
        recorded_repo([step])
    assert "repo_id" in str(error.value)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], hub_model_id="me/my-run")
    torch.save(arguments, tmp_path / "training_args.bin")
    assert recorded_repo([step]) == "me/my-run"
    assert recorded_repo([tmp_path]) == "me/my-run"
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], hub_model_id="my-run")
    torch.save(arguments, tmp_path / "training_args.bin")
    with pytest.raises(UsageError, match="without its owner") as error:
        recorded_repo([step])
    assert "repo_id='ORG/my-run'" in str(error.value)


def test_what_an_unknown_class_records(tmp_path: Path) -> None:
    """Training arguments may have an unimportable class, and some files are no arguments at all."""
    import torch

    class Arguments:
        def __init__(self, **values: object) -> None:
            self.__dict__.update(values)

    Arguments.__module__, Arguments.__qualname__ = "not_installed_anywhere", "Arguments"
    module = types.ModuleType("not_installed_anywhere")
    module.Arguments = Arguments
    path = tmp_path / "training_args.bin"
    name = "me/its-run"
    for values, found in [
        ({"output_dir": "out", "hub_model_id": name, "hub_token": None}, name),
        ({"run_name": name, "hub_model_id": name}, name),  # from the memo
        ({"hub_model_id": None, "run_name": name}, None),
        ({"other": 3, "hub_model_id": ["a", name]}, None),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "not_installed_anywhere", module)
            torch.save(Arguments(**values), path)
        if found:
            assert recorded_repo([tmp_path]) == found
        else:
            with pytest.raises(UsageError, match="does not record one"):
                recorded_repo([tmp_path])
    whole = path.read_bytes()
    for content in (
        b"",
        b"PK",
        whole[:200],
        whole[:-30],
        b"\x80\x02]q\x00.",
        whole.replace(b"hub_model_id", b"\xff" * 12),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="does not record one"):
            recorded_repo([tmp_path])


def test_what_axolotls_card_records(tmp_path: Path) -> None:
    card = "# out\n\n```yaml\nbase_model: org/base\nhub_model_id: {}\nlora_r: 16\n```\n"
    (tmp_path / "README.md").write_text(card.format("me/my-axolotl  # mine"))
    assert recorded_repo([tmp_path]) == "me/my-axolotl"
    for none in ("null", "", "~"):
        (tmp_path / "README.md").write_text(card.format(none))
        with pytest.raises(UsageError, match="does not record one"):
            recorded_repo([tmp_path])


def test_merge_and_push_from_a_run_folder(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--push` alone, adapter, base and repository come from the run's records."""
    import torch
    from transformers import TrainingArguments

    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "lora-zero3", run)
    monkeypatch.chdir(run)
    asking = ckpt("merge-lora", "--push")
    assert asking.code == 2 and "to which repository" in asking.err and "--repo-id ORG/NAME" in asking.err
    arguments = TrainingArguments(str(run), use_cpu=True, report_to=[], hub_model_id=REPO)
    torch.save(arguments, run / "training_args.bin")
    own = f"{REPO}-merged"  # the run's own repository is the adapter's
    server.repos[REPO] = Repo(private=False)
    server.repos[REPO].branches["main"] = {"adapter_config.json": File(b"{}", False), "README.md": File(b"x", False)}
    merged = tmp_path / "run-merged"
    refused = ckpt("merge-lora", "--push", "--repo-id", REPO)
    assert refused.code == 2 and "holds an adapter" in refused.err and not merged.exists()
    server.refuse = 0
    monkeypatch.setattr(sys, "argv", ["ckpt", "merge-lora", "--push"])  # for the card
    failed = ckpt("merge-lora", "--push")
    assert failed.code == 7 and f"ckpt push {merged} --repo-id {own}" in failed.err
    server.refuse = None
    resumed = ckpt("push", merged, "--repo-id", own)
    assert resumed.code == 0, resumed.err
    assert server.tree(own) == contents(merged)
    assert server.tree(REPO) == {"adapter_config.json": b"{}", "README.md": b"x"}
    card = (merged / "README.md").read_text()
    assert "ckpt merge-lora --push" in card and api.digests(api.open(merged)).whole["weights"] in card
    again = ckpt("merge-lora", ".", "--push", "--overwrite", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["pushed"]["repo_id"] == own


def test_options_of_a_push_without_it(tmp_path: Path) -> None:
    report = ckpt("merge-lora", FIXTURES / "lora-zero3", "-o", tmp_path / "out", "--repo-id", REPO)
    assert report.code == 2 and "go with --push" in report.err
