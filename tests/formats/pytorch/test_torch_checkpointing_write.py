"""`converters/pytorch/torch_checkpointing_write.py`: what torch_checkpointing 0.1.1 writes, and loads.

`TORCH_CHECKPOINTING_PYTHON` names a Python with torch_checkpointing for the slow test.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

import ckpt
from ckpt import api
from ckpt.base.errors import UsageError
from tests.support.places import FIXTURES, REPOSITORY

RUN = FIXTURES / "torch-checkpointing"
FORMS = {"named": "step-2", "flat": "step-3"}
CPU = {"mesh_device": "cpu"}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(source: Path, out: Path, ranks: int, **options: Any) -> Path:
    ckpt.convert(source, "torch-checkpointing", out, world_size=ranks, **options)
    return out


def described(folder: Path) -> dict[str, Any]:
    return dict(pickle.loads((folder / "metadata.pkl").read_bytes()))


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return "DTensor", value.shape, value.placements, str(value.device_mesh), plain(value._local_tensor)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_what_torch_checkpointing_wrote_is_written_again(form: str, tmp_path: Path) -> None:
    """The model of step-3 is in safetensors files, which become torch files."""
    step = RUN / FORMS[form]
    out = written(step, tmp_path / "out", 2)
    mine, own = described(out), described(step)
    for item in own["metadata"].values():
        item["rank_to_layout_info"] = dict.fromkeys(range(2))
    assert mine == own
    names = {file.name.replace(".safetensors", ".pt") for file in step.iterdir()}
    assert {file.name for file in out.iterdir()} == names | {"config.json", "ckpt-manifest.json"}
    for file in step.glob("*.pt"):
        ours, theirs = (plain(torch.load(folder / file.name, weights_only=False)) for folder in (out, step))
        if file.name.startswith("dataloader"):  # every rank's key is in every file
            assert theirs.items() <= ours.items()
        else:
            assert ours == theirs, file.name


@pytest.mark.parametrize("source", ["dcp-fsdp2", "toy-zero3"])
def test_another_engines_run_becomes_a_save(source: str, tmp_path: Path) -> None:
    """Each rank holds its rows. A rank after the last row holds none."""
    run = Path(shutil.copytree(FIXTURES / source, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    out = written(run, tmp_path / "out", 3, **CPU)
    assert ckpt.verify(run, out).equal and ckpt.check(out).whole
    parts = [torch.load(out / f"model_{rank}.pt", weights_only=False) for rank in range(3)]
    for path, (group,) in described(out)["metadata"]["model"]["nested_path_to_metadata"].items():
        (fqn,) = json.loads(path)
        values, said = [part[fqn] for part in parts], group["sharding_metadata"]["data"]
        is_cut = said["placements"] == [{"type": "Shard", "dim": 0}]
        assert [isinstance(value, DTensor) for value in values] == [is_cut] * 3
        if is_cut:
            rows = [value._local_tensor.shape[0] for value in values]
            assert sum(rows) == said["global_shape"][0] and rows == sorted(rows, reverse=True)
        assert {str(value.dtype) for value in values} == {said["dtype"]}


def test_torchtitans_items_are_written(tmp_path: Path) -> None:
    """As its `TorchCheckpointingManager` passes them: the model in an item, the optimizer flattened."""
    source = FIXTURES / "torchtitan-llama3"
    run = Path(shutil.copytree(source, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    out = written(run, tmp_path / "out", 2, **CPU)
    assert ckpt.verify(run, out).equal
    model, optimizer = (torch.load(out / f"{item}_0.pt", weights_only=False) for item in ("model", "optimizer"))
    assert "tok_embeddings.weight" in model and "state.tok_embeddings.weight.exp_avg" in optimizer
    assert "param_groups.tok_embeddings.weight.lr" in optimizer
    ckpt.convert(out, "dcp", tmp_path / "dcp")
    assert ckpt.verify(run, tmp_path / "dcp").equal


def test_a_flattened_optimizer_stays_flattened_in_dcp(form: str, tmp_path: Path) -> None:
    """Its run looks for these keys, and `dcp.load` fails without them."""
    ckpt.convert(RUN / FORMS[form], "dcp", tmp_path / "out")
    keys = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert ("optimizer.param_groups.lm_head.weight.lr" in keys) == (form == "flat")
    assert ckpt.verify(RUN / FORMS[form], tmp_path / "out").equal


def test_tied_names_share_one_tensor(tmp_path: Path) -> None:
    """FSDP2's state dict has both names, with one storage (torch 2.13)."""
    run = Path(shutil.copytree(FIXTURES / "toy-zero1", tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    ties = api.open(run).ties
    out = written(run, tmp_path / "out", 2, **CPU)
    part = torch.load(out / "model_1.pt", weights_only=False)
    for alias, owner in ties.items():
        assert part[alias]._local_tensor.data_ptr() == part[owner]._local_tensor.data_ptr()
    assert ties and api.open(out).ties == ties


def test_values_of_each_rank_stay_with_their_rank(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN / "step-2", tmp_path / "run"))
    for rank in range(2):
        torch.save({"seed": rank, 5: "key"}, run / f"random_{rank}.pt")
    out = written(run, tmp_path / "out", 2)
    assert [torch.load(out / f"random_{rank}.pt") for rank in range(2)] == [{"seed": r, 5: "key"} for r in range(2)]
    conversion = api.plan(run, "torch-checkpointing", world_size=3)
    assert "random_0.pt" not in conversion.files
    assert any("training state random of 2 ranks" in one for one in conversion.plan.target.not_written)


def test_the_number_of_ranks_is_asked_for(tmp_path: Path) -> None:
    """A load on other ranks keeps the new run's lr, so no number is safe to assume."""
    model = ckpt.convert(RUN / "step-2", "hf", tmp_path / "hf", names="own").path
    with pytest.raises(UsageError, match="no rank count"):
        api.plan(model, "torch-checkpointing")
    assert not any(
        "param groups" in note for note in api.plan(model, "torch-checkpointing", world_size=2).plan.target.notes
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_its_own_loader_takes_it(form: str, ranks: int, tmp_path: Path) -> None:
    python = os.environ.get("TORCH_CHECKPOINTING_PYTHON")
    if not python:
        pytest.skip("TORCH_CHECKPOINTING_PYTHON names no Python that has torch_checkpointing")
    step = FORMS[form]
    number = int(step[-1])
    out = written(RUN / step, tmp_path / "out", ranks)
    script = REPOSITORY / "tests/support/torch_checkpointing_loading.py"
    command = [python, str(script), str(out), str(ranks), form, str(tmp_path / "loaded")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [number, pytest.approx(0.01 / (number + 1)), number, number]
    truth, loaded = load_file(RUN / "truth" / f"{step}.safetensors"), load_file(tmp_path / "loaded")
    assert truth.keys() == loaded.keys()
    assert all(torch.equal(truth[name].view(torch.int32), loaded[name].view(torch.int32)) for name in truth)
