"""`ckpt/commands/push/run_state.py`: a push publishes no training state unless the user asks for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.commands.push.push import files_to_push
from ckpt.commands.push.run_state import check_no_run
from ckpt.errors import LossError
from tests.support.commands import ckpt as run_ckpt
from tests.support.hub_server import HubServer
from tests.support.places import FIXTURES

#: Run folders in the state their trainers leave.
RUNS = ("trainer-zero2", "trainer-plain", "trl-zero3/outputs", "trl-lora-zero3/outputs", "axolotl-fsdp2", "dcp-fsdp2")
#: A run's file or folder next to a model, and its name in the refusal.
STATE = {
    "optimizer.pt": "optimizer.pt",
    "scheduler.pt": "scheduler.pt",
    "training_args.bin": "training_args.bin",
    "trainer_state.json": "trainer_state.json",
    "rng_state_0.pth": "rng_state_0.pth",
    "random_states_0.pkl": "random_states_0.pkl",
    "latest": "latest",
    "checkpoint-4/model.safetensors": "checkpoint-4/",
    "global_step4/mp_rank_00_model_states.pt": "global_step4/",
    "optimizer_0/__0_0.distcp": "optimizer_0/",
    "optimizer-00001-of-00002.safetensors": "optimizer-00001-of-00002.safetensors",
}
#: Files that belong to a Hub model.
OF_A_MODEL = (
    "README.md",
    "pytorch_model-00001-of-00002.bin",
    "data/train-00000-of-00001.parquet",
    "model-00001-of-00002.gguf",
    "onnx/model_optimized.onnx",
    "1_Pooling/config.json",
    "value_head.safetensors",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    ckpt.plan(FIXTURES / "trainer-zero2", "hf").run(folder)
    return folder


def check(folder: Path) -> None:
    check_no_run(folder, files_to_push(folder))


@pytest.mark.parametrize("run", RUNS)
def test_push_refuses_a_run(run: str) -> None:
    with pytest.raises(LossError) as caught:
        check(FIXTURES / run)
    assert caught.value.code == "push-of-a-run" and "--whole-run" in str(caught.value.hint)


@pytest.mark.parametrize("name", STATE)
def test_push_refuses_training_state_next_to_a_model(model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    check(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(LossError) as caught:
        check(folder)
    assert caught.value.found == STATE[name]


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_push_takes_the_files_of_a_model(model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    check(folder)


@pytest.mark.parametrize("name", ["last.ckpt", "trainer.pkl", "state.tar", "rewards.pth"])
@pytest.mark.parametrize("key", ["optimizer", "optimizers"])
def test_push_refuses_an_optimizer_inside_a_torch_file(key: str, name: str, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(layer.state_dict(), folder / name)
    check(folder)
    state = optimizer.state_dict() if key == "optimizer" else [{"actor": optimizer.state_dict()}]
    torch.save({"actor": layer.state_dict(), "epoch": 1, key: state}, folder / name)
    with pytest.raises(LossError, match=name):
        check(folder)


def test_push_refuses_a_torch_file_of_an_optimizer_alone(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    shutil.copy(FIXTURES / "trainer-plain" / "checkpoint-2" / "optimizer.pt", folder / "last.bin")
    with pytest.raises(LossError, match="would publish the training state") as failure:
        check(folder)
    assert failure.value.found == "last.bin"


def test_push_of_a_whole_run_says_who_can_see_it(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "run")
    refused = run_ckpt("push", run, "--repo-id", "me/run")
    assert refused.code == 6 and "checkpoint-1/, checkpoint-2/" in refused.err, refused.err
    assert "me/run" not in server.repos, "nothing was made"
    for repo, options, seen_by in (("me/run", [], "public"), ("me/hidden", ["--private"], "private")):
        pushed = run_ckpt("push", run, "--repo-id", repo, "--whole-run", *options)
        assert pushed.code == 0 and f"/{repo} ({seen_by})\n" in pushed.err, pushed.err
        assert "checkpoint-2/trainer_state.json" in server.tree(repo)
    hint = str(refused.err).partition("`ckpt ")[2].partition("`")[0]
    monkeypatch.chdir(tmp_path)
    written = run_ckpt(*hint.split())
    assert written.code == 0 and run_ckpt("push", written.out.strip(), "--repo-id", "me/model").code == 0
