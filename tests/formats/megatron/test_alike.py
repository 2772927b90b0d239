"""`converters/megatron/optimizer.py`: an optimizer state missing for some parameters is damage, in every format."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from tests.support.commands import ckpt
from tests.support.megatron_runs import sample
from tests.support.model_files import rewriting
from tests.support.places import FIXTURES

FOLDER = "iter_0000002"
#: By case: the fixture, the lost key, and the parameter and state that the message must name.
LOST = {
    "a moment of an item for all layers": (
        "megatron-dist-flattened",
        "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc2.weight",
        ("decoder.layers.0.mlp.linear_fc2.weight", "exp_avg_sq"),
    ),
    "a master": (
        "megatron-dist-flattened",
        "optimizer.state.fp32_param.decoder.final_layernorm.weight",
        ("decoder.final_layernorm.weight", "master"),
    ),
    "a bucket": ("megatron-lm", ".bucket_idx_1.exp_avg", ("embedding.word_embeddings.weight", "exp_avg")),
    "Muon's momentum": (
        "megatron-lm-muon",
        "momentum_buffer.decoder.layers.self_attention.linear_proj.weight",
        ("decoder.layers.0.self_attention.linear_proj.weight", "momentum_buffer"),
    ),
    "a moment of the Adam beside Muon": ("megatron-lm-muon", ".exp_avg_sq", ("exp_avg_sq",)),
    "a moment under Megatron-FSDP": (
        "megatron-fsdp",
        "decoder.layers.0.mlp.linear_fc2.weight.exp_avg",
        ("decoder.layers.0.mlp.linear_fc2.weight", "exp_avg"),
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_a_state_that_one_parameter_lacks(case: str, tmp_path: Path) -> None:
    fixture, key, words = LOST[case]
    run = _copy(fixture, tmp_path)
    _forget(run, lambda name: name.endswith(key), most=1)
    _is_damaged(run, *words)


@pytest.mark.parametrize("fixture", ["megatron-dist-flattened", "megatron-fsdp", "megatron-lm"])
def test_adam_has_both_moments(fixture: str, tmp_path: Path) -> None:
    """No state of this kind is left to compare with."""
    run = _copy(fixture, tmp_path)
    _forget(run, lambda name: ".exp_avg_sq" in name)
    _is_damaged(run, "exp_avg_sq")


def test_a_parameter_that_was_frozen_has_none(tmp_path: Path) -> None:
    run = _copy("megatron-dist-flattened", tmp_path)
    _forget(run, lambda name: name.startswith("optimizer.state.") and name.endswith("linear_fc2.weight"))
    assert ckpt("check", run).code == 0
    assert "parameters were frozen, or their states were lost" in ckpt("inspect", run).out
    assert not [key for key in api.open(run).tensors if "linear_fc2" in key[0] and key[1] != "weight"]


def _edit(run: Path, file: str, change: Callable[[Any], object]) -> None:
    path = next(run.glob(f"{FOLDER}/mp_rank_01*/{file}"))
    with rewriting(path) as state:
        change(state)


def _without_a_moment(state: Any) -> None:
    del state["optimizer"]["optimizer"]["state"][3]["exp_avg_sq"]


def _without_a_state(state: Any) -> None:
    del state["optimizer"]["optimizer"]["state"][3]


def _without_a_buffers_moment(state: Any) -> None:
    (flat,) = state[0].values()
    del flat["exp_avg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "change"),
    [
        ("llama-plain", "model_optim_rng.pt", _without_a_moment),
        ("llama-plain", "model_optim_rng.pt", _without_a_state),
        ("llama", "distrib_optim.pt", _without_a_buffers_moment),
    ],
    ids=["a moment", "all of a parameter", "a buffer's moment"],
)
def test_the_torch_format(name: str, file: str, change: Callable[[Any], object], tmp_path: Path) -> None:
    run = shutil.copytree(sample(name), tmp_path / "run")
    assert ckpt("check", run).code == 0
    _edit(run, file, change)
    result = ckpt("check", run)
    assert result.code == 4 and "exp_avg" in result.out + result.err, result.out + result.err


def _copy(fixture: str, tmp_path: Path) -> Path:
    run = shutil.copytree(FIXTURES / fixture, tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    assert ckpt("check", run).code == 0
    return run


def _forget(run: Path, lost: Callable[[str], bool], most: int | None = None) -> None:
    """Remove keys from the metadata, as if no rank had saved them."""
    file = run / FOLDER / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    names = [name for name in metadata.state_dict_metadata if lost(name)][:most]
    assert names
    for name in names:
        del metadata.state_dict_metadata[name]
        if metadata.planner_data:
            metadata.planner_data.pop(name, None)
    metadata.storage_data = {at: one for at, one in metadata.storage_data.items() if at.fqn not in names}
    file.write_bytes(pickle.dumps(metadata))


def _is_damaged(run: Path, *words: str) -> None:
    result = ckpt("check", run)
    said = result.out + result.err
    assert result.code == 4 and "lacks a state, but others with the same optimizer have it" in said, said
    assert [word for word in words if word not in said] == []
