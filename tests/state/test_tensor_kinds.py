"""`ckpt/state/kept_dtypes.py`: conversions of buffers and float32 tensors, against transformers and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.plan.checkpoint import BUFFER
from tests.support import architectures

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("glm4_moe")
    architectures.numbered(architectures.tiny_model("glm4_moe")).save_pretrained(root / "hub")
    return root


def _notes(done: Any) -> str:
    return "\n".join(done.to_json()["notes"])


def test_dtype_keeps_what_transformers_keeps(folder: Path, tmp_path: Path) -> None:
    done = ckpt.convert(folder / "hub", "hf", tmp_path / "hf", dtype="bf16")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "hub", dtype=torch.bfloat16).save_pretrained(tmp_path / "peer")
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "peer"))
    assert ours[BIAS].dtype == torch.float32
    assert {name: one.dtype for name, one in ours.items()} == {name: one.dtype for name, one in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert f"1 tensor kept in float32: buffers, and parameters that transformers keeps too ({BIAS})" in _notes(done)
    assert "kept in float32" not in _notes(ckpt.convert(folder / "hub", "hf", tmp_path / "same"))


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_buffers_stay_buffers_for_deepspeed(folder: Path, tmp_path: Path, stage: str) -> None:
    done = ckpt.convert(folder / "hub", stage, tmp_path / "run", world_size=2)
    root: dict[str, Any] = torch.load(next(tmp_path.glob("run/*/*model_states.pt")), weights_only=False)
    assert root["buffer_names"] == [BIAS]
    assert BIAS not in {name for group in root["param_shapes"] for name in group}
    assert torch.equal(root["module"][BIAS], load_file(folder / "hub" / "model.safetensors")[BIAS])
    assert "buffers are unknown" not in _notes(done)
    assert ckpt.open(tmp_path / "run").get(BIAS, BUFFER) is not None


def test_zero3_fails_to_load_a_buffer_as_a_frozen_parameter(folder: Path, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8: "size mismatch for BIAS: copying a param with shape [0]"; stages 1 and 2 load it."""
    state = load_file(folder / "hub" / "model.safetensors")
    trained = {name: one for name, one in state.items() if name != BIAS}
    adam = {"state": {n: {"exp_avg": w, "exp_avg_sq": w, "step": torch.tensor(1.0)} for n, w in trained.items()}}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "params": list(trained)}]
    torch.save({"model": state, "optimizer": adam | {"param_groups": groups}}, tmp_path / "full.pt")
    note = f"{BIAS} outside the optimizer, written as frozen: if this includes a buffer, ZeRO-3 fails"
    for stage in ("zero2", "zero3"):
        done = ckpt.convert(tmp_path / "full.pt", stage, tmp_path / stage, world_size=1)
        root = torch.load(next(tmp_path.glob(f"{stage}/*/*model_states.pt")), weights_only=False)
        assert (root["module"][BIAS].shape == (0,)) == (note in _notes(done)) == (stage == "zero3")


def test_a_buffer_in_the_optimizer_is_a_parameter(folder: Path, tmp_path: Path) -> None:
    """The model's own code may have a parameter here, like DeepSeek's."""
    state = load_file(folder / "hub" / "model.safetensors")
    momentum = {name: torch.ones_like(one) for name, one in state.items()}
    adam = {"state": {n: {"exp_avg": m, "exp_avg_sq": m, "step": torch.tensor(1.0)} for n, m in momentum.items()}}
    adam["param_groups"] = [{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "params": list(state)}]  # type: ignore[assignment]
    torch.save({"model": state, "optimizer": adam}, tmp_path / "full.pt")
    ckpt.convert(tmp_path / "full.pt", "zero3", tmp_path / "run", config=folder / "hub", world_size=1)
    root = torch.load(next(tmp_path.glob("run/*/*model_states.pt")), weights_only=False)
    assert not root["buffer_names"]


def test_unknown_architectures_are_named(folder: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 4), "norm.running_mean": torch.ones(4)}, tmp_path / "model.safetensors")
    done = ckpt.convert(tmp_path / "model.safetensors", "full", tmp_path / "out", dtype="bf16")
    assert "1 parameter cast from float32 to bfloat16 by --dtype; this architecture is unknown" in _notes(done)
    assert "kept in float32" in _notes(done)
    run = ckpt.convert(tmp_path / "model.safetensors", "zero3", tmp_path / "run", world_size=1)
    assert "buffers are unknown for this architecture" in _notes(run)


def test_a_wider_minority_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tensors = {"model.a.weight": torch.ones(8, 8).bfloat16(), "model.A_log": torch.full((4,), 1 / 3)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "own"}')
    done = ckpt.convert(tmp_path / "in", "hf", tmp_path / "out", dtype="bf16", names="own")
    assert "1 tensor rounded from float32, unlike the others (model.A_log)" in _notes(done)
