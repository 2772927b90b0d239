"""`ckpt/commands/push/push.py`: the files pushed from a folder, and repositories with other weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt import api
from ckpt.commands.push import push as hub
from ckpt.errors import CorruptError, StorageError, UsageError
from ckpt.plan.checkpoint import Layout
from tests.support.commands import ckpt
from tests.support.hub_server import File, HubServer, Repo
from tests.support.places import REPOSITORY

MODEL = REPOSITORY / "fixtures" / "moe-zero3"
REPO = "me/model"

#: Files by weight set.
FILES = {
    "model.safetensors": ["model.safetensors"],
    "safetensors shards": [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ],
    "pytorch_model.bin": ["pytorch_model.bin"],
    "bin shards": [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ],
    "adapter_model.safetensors": ["adapter_config.json", "adapter_model.safetensors"],
    "adapter_model.bin": ["adapter_config.json", "adapter_model.bin"],
}
MODELS = list(FILES)[:4]
#: Allowed pairs (here, there): every loader picks the pushed set.
HARMLESS = {
    ("model.safetensors", "bin shards"),
    ("safetensors shards", "bin shards"),
    ("adapter_model.safetensors", "adapter_model.bin"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    output = tmp_path / "model"
    api.plan(api.open(MODEL), "hf").run(output)
    return output


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def fill(server: HubServer, *names: str) -> dict[str, File]:
    """Fill a repository with these file names."""
    server.repos[REPO] = Repo(private=False, branches={"main": {name: File(b"older", False) for name in names}})
    return server.repos[REPO].branches["main"]


@pytest.mark.parametrize("below", ["", "checkpoint-4/"])
@pytest.mark.parametrize("there", FILES)
@pytest.mark.parametrize("here", FILES)
def test_every_kind_of_weights_beside_every_other(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, here: str, there: str, below: str
) -> None:
    fill(server, *(below + name for name in FILES[there]), "config.json")
    files, to = {below + name for name in FILES[here]}, hub.Push(REPO)
    if here == there or (here, there) in HARMLESS or (below and (here in MODELS) != (there in MODELS)):
        hub.check_room(files, to)
        return
    with pytest.raises(UsageError) as refused:
        hub.check_room(files, to)
    if (here in MODELS) == (there in MODELS):
        assert "not the pushed ones" in str(refused.value)
        assert f"`hf repos delete-files {REPO} " in str(refused.value)
        monkeypatch.setitem(server.repos[REPO].branches, "main", {})  # follow the hint
        hub.check_room(files, to)


def test_files_of_one_set_that_stay(server: HubServer) -> None:
    """No index names shards with another count any more; an old index would name the old shards."""
    fill(server, "model-00001-of-00003.safetensors", *FILES["safetensors shards"])
    hub.check_room(set(FILES["safetensors shards"]), hub.Push(REPO))
    with pytest.raises(UsageError, match="not the pushed ones"):
        hub.check_room(set(FILES["safetensors shards"][:2]), hub.Push(REPO))


@pytest.mark.parametrize("max_shard_size", [1 << 30, 40000])
def test_bin_over_safetensors_is_refused(server: HubServer, tmp_path: Path, max_shard_size: int) -> None:
    api.plan(api.open(MODEL), "hf", Layout(max_shard_size=max_shard_size)).run(tmp_path / "hf")
    api.plan(api.open(tmp_path / "hf"), "full").run(tmp_path / "full")
    assert ckpt("push", tmp_path / "hf", "--repo-id", REPO).code == 0
    before = server.tree(REPO)
    report = ckpt("push", tmp_path / "full", "--repo-id", REPO)
    assert report.code == 2 and server.tree(REPO) == before, report.err
    assert "transformers would load other weights" in report.err and f"hf repos delete-files {REPO} " in report.err


def test_what_stays_and_harms_nobody_is_said(server: HubServer, folder: Path) -> None:
    (folder / "ckpt-manifest.json").unlink()
    there = fill(server, *FILES["bin shards"], "ckpt-manifest.json")
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 0, report.err
    said = "note: unused weights stay in me/model: `hf repos delete-files me/model"
    assert f"{said} 'pytorch_model-*-of-00002.bin' pytorch_model.bin.index.json`" in report.err
    assert "note: a manifest of other files stays in me/model" in report.err and "pytorch_model.bin.index.json" in there


def test_a_merge_is_refused_before_it_is_done(server: HubServer, tmp_path: Path) -> None:
    fill(server, *FILES["pytorch_model.bin"])
    output = tmp_path / "merged"
    lora = REPOSITORY / "fixtures" / "lora-zero3"
    report = ckpt("merge-lora", lora, "-o", output, "--push", "--repo-id", REPO)
    assert report.code == 2 and "accelerate would load other weights" in report.err and not output.exists(), report.err


def test_a_symlink_out_of_the_folder_is_refused(server: HubServer, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    for target, name in [(secret, "notes.txt"), (tmp_path, "more"), (Path("../token"), "sub/notes.txt")]:
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target if target.is_absolute() else Path("..") / target)
        report = ckpt("push", folder, "--repo-id", REPO)
        assert report.code == 5 and "a symlink leads out of" in report.err, (name, report.err)
        assert REPO not in server.repos
        link.unlink()


def test_links_that_stay_inside(server: HubServer, folder: Path, tmp_path: Path) -> None:
    """Snapshots in the Hub's cache are links into `blobs`; links within the folder count as its files."""
    entry = tmp_path / "models--me--model"
    shutil.copytree(folder, entry / "blobs")
    snapshot = entry / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    for file in (entry / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (snapshot / "same.json").symlink_to("config.json")
    report = ckpt("push", snapshot, "--repo-id", REPO)
    assert report.code == 0, report.err
    expected = {file.name: file.read_bytes() for file in snapshot.iterdir()}
    tree = server.tree(REPO)
    assert {name: tree[name] for name in expected} == expected and "same.json" in tree


def test_hidden_files_and_what_is_no_file(server: HubServer, folder: Path) -> None:
    for name in (".env", ".ssh/id_rsa", "sub/.netrc", ".git/config", ".gitattributes", "sub/[1].txt", "sub/1.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    os.mkfifo(folder / "pipe")
    (folder / "again").symlink_to("sub")
    (folder / "dangling").symlink_to("gone")
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 0, report.err
    assert "note: hidden files are not pushed: .env, .git, .ssh, sub/.netrc; " in report.err
    assert "note: not pushed, not regular files: again, dangling, pipe" in report.err
    extra = set(server.tree(REPO)) - {file.name for file in folder.iterdir() if file.is_file()}
    assert extra == {"README.md", "sub/[1].txt", "sub/1.txt"} and ".gitattributes" in server.tree(REPO)


def test_a_folder_that_cannot_be_read_is_no_empty_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    scan = os.scandir

    def deny(path: str) -> object:
        if os.path.basename(path) == "sub":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(StorageError, match="Permission denied"):
        hub.push(folder, hub.Push(REPO))


def test_the_metadata_of_dcp_is_pushed(server: HubServer, tmp_path: Path) -> None:
    api.plan(api.open(MODEL), "dcp").run(tmp_path / "dcp")
    report = ckpt("push", tmp_path / "dcp", "--repo-id", REPO, "--whole-run")
    assert report.code == 0 and ".metadata" in server.tree(REPO), report.err
    assert "hidden" not in report.err


@pytest.mark.parametrize("options", [[], ["--create-pr"]])
def test_a_folder_that_is_not_what_its_manifest_says(server: HubServer, folder: Path, options: list[str]) -> None:
    flip(folder / "model.safetensors", -100)
    report = ckpt("push", folder, "--repo-id", REPO, *options)
    assert report.code == 4 and "does not match its own manifest" in report.err and "has changed" in report.err
    assert f"ckpt verify {folder}" in report.err and REPO not in server.repos
    flip(folder / "model.safetensors", -100)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 4 and "config.json" in report.err and "remove ckpt-manifest.json" in report.err
    (folder / "ckpt-manifest.json").unlink()
    assert ckpt("push", folder, "--repo-id", REPO).code == 0


def test_a_manifest_that_is_none_is_refused(server: HubServer, folder: Path) -> None:
    (folder / "ckpt-manifest.json").write_text("{}")
    report = ckpt("push", folder, "--repo-id", REPO)
    assert report.code == 4 and "manifest" in report.err and REPO not in server.repos


def test_a_card_that_was_written_anew(server: HubServer, tmp_path: Path) -> None:
    """Users may edit a card; a merge's manifest holds the original card's digest."""
    merged, lora = tmp_path / "merged", REPOSITORY / "fixtures" / "lora-zero3"
    server.refuse = 0
    assert ckpt("merge-lora", lora, "-o", merged, "--push", "--repo-id", REPO).code == 7
    server.refuse = None
    (merged / "README.md").write_text("---\ntags: [mine]\n---\nmine\n")
    report = ckpt("push", merged, "--repo-id", REPO)
    assert report.code == 0 and server.tree(REPO)["README.md"].endswith(b"mine\n"), report.err


def test_a_file_that_changes_during_the_push(server: HubServer, folder: Path) -> None:
    def say(line: str) -> None:
        if line.startswith("pushing"):  # after the manifest check
            flip(folder / "model.safetensors", -100)

    with pytest.raises(CorruptError, match="replaced while it was being read"):
        hub.push(folder, hub.Push(REPO), say=say)


def save(folder: Path, name: str, state: dict) -> None:
    """Save `state` as one weight set, in all its files."""
    import torch
    from safetensors.torch import save_file

    write = torch.save if "bin" in name else save_file
    first, *others = state
    parts = [state] if len(FILES[name]) == 1 else [{first: state[first]}, {key: state[key] for key in others}]
    for file, part in zip(FILES[name], parts, strict=False):
        write(part, folder / file)
    if len(parts) > 1:
        weights = {key: file for file, part in zip(FILES[name], parts, strict=False) for key in part}
        (folder / FILES[name][-1]).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize("theirs", MODELS)
@pytest.mark.parametrize("ours", MODELS)
def test_which_of_two_sets_the_loaders_take(tmp_path: Path, ours: str, theirs: str) -> None:
    """Each loader's preference assumed by `ckpt push`; vLLM is not installed."""
    import torch
    from accelerate import load_checkpoint_in_model
    from transformers import LlamaConfig, LlamaForCausalLM

    if ours == theirs:
        return
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, tie_word_embeddings=False, **sizes))
    model.config.save_pretrained(tmp_path)
    for value, name in enumerate((ours, theirs)):
        save(tmp_path, name, {key: torch.full_like(one, value) for key, one in model.state_dict().items()})
    taken = LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight[0, 0].item()
    assert (ours, theirs)[int(taken)] == next(n for n in hub._ORDERS["transformers"] if n in (ours, theirs))
    if expected := next((name for name in hub._ORDERS["accelerate"] if name in (ours, theirs)), None):
        load_checkpoint_in_model(model, tmp_path)
        assert (ours, theirs)[int(model.lm_head.weight[0, 0].item())] == expected


def test_which_of_two_adapters_peft_takes(tmp_path: Path) -> None:
    import torch
    from peft.utils.save_and_load import load_peft_weights
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "adapter_model.bin")
    assert float(load_peft_weights(str(tmp_path), device="cpu")["x"]) == 0
    assert hub._ORDERS["PEFT"][0] == "adapter_model.safetensors"
