"""`converters/pytorch/local_state.py`: FSDP1's LOCAL_STATE_DICT from Accelerate matches the live models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckpt
from ckpt.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from tests.support import commands
from tests.support.describing import content
from tests.support.engines import raw

#: A run with only flat parameters, and one that also has the model's own (`use_orig_params`), one of them frozen.
RUNS = ("local-flat", "local-orig")
FILE = "pytorch_model_fsdp_rank{}.bin"


def truth_of(fixtures: Path, name: str) -> dict[tuple[str, str], bytes]:
    tensors = load_file(fixtures / name / "truth/checkpoint-2.safetensors")
    pairs = ((key.partition("/"), tensor) for key, tensor in tensors.items())
    return {(fqn, role): raw(tensor) for (role, _, fqn), tensor in pairs}


@pytest.fixture
def copied(fixtures: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(fixtures / name / "checkpoint-2", tmp_path / name / "checkpoint-2"))

    return copy


@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_live_model_gathered(fixtures: Path, name: str) -> None:
    checkpoint, truth = ckpt.open(fixtures / name), truth_of(fixtures, name)
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == truth
    assert (checkpoint.format, checkpoint.world_size) == ("dcp", 3)
    assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    trained = {fqn for fqn, role in truth if role == "exp_avg"}
    assert set(checkpoint.state.scalars["step"].values()) == {2.0}
    assert {fqn for group in checkpoint.state.param_groups for fqn in group.fqns} == trained
    frozen = {fqn for fqn, role in truth if role == "weight"} - trained
    assert frozen == ({"model.layers.1.mlp.down_proj.weight"} if name == "local-orig" else set())


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("target", ["hf", "full", "dcp"])
def test_goes_on_to_other_formats(fixtures: Path, tmp_path: Path, name: str, target: str) -> None:
    out = tmp_path / "out"
    assert commands.ckpt("convert", "auto", target, fixtures / name, "-o", out).code == 0
    written, expected = ckpt.open(out, target), truth_of(fixtures, name)
    expected = {key: bits for key, bits in expected.items() if target != "hf" or key[1] == "weight"}
    assert {key: content(tensor) for key, tensor in written.tensors.items()} == expected
    assert target != "dcp" or {one.name for one in out.iterdir()} >= {"pytorch_model_fsdp_0", "optimizer_0"}


def test_shapes_are_those_of_the_states_or_of_the_configs_model(fixtures: Path, copied: Callable[[str], Path]) -> None:
    for name in RUNS:
        weights = {key: bits for key, bits in truth_of(fixtures, name).items() if key[1] == "weight"}
        alone = copied(name)
        shutil.rmtree(alone / "optimizer_0")
        found = ckpt.open(alone)
        assert {key: content(tensor) for key, tensor in found.tensors.items()} == weights
    (alone / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"LOCAL_STATE_DICT.*unknown: no known group .*_flat_param"):
        ckpt.open(alone)
    assert len(ckpt.open(alone, config=str(fixtures / "local-flat/checkpoint-2")).tensors) == len(weights)


def test_a_frozen_parameter_takes_the_config(fixtures: Path, copied: Callable[[str], Path]) -> None:
    """Optimizer states cover only the other parameters. In a run with only flat parameters, they cover all."""
    run = copied("local-orig")
    (run / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"unknown: the shape of model\.layers\.1\.mlp\.down_proj\.weight"):
        ckpt.open(run)
    flat = copied("local-flat")
    (flat / "config.json").unlink()
    found = {key: content(tensor) for key, tensor in ckpt.open(flat).tensors.items()}
    assert found == truth_of(fixtures, "local-flat")


@pytest.mark.parametrize("name", RUNS)
def test_the_config_of_another_model(copied: Callable[[str], Path], name: str) -> None:
    run = copied(name)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    with pytest.raises(CorruptError, match="the config and the optimizer states belong to different models"):
        ckpt.open(run)
    shutil.rmtree(run / "optimizer_0")
    with pytest.raises(CkptError, match=r"do not add up to the parameter|unknown: no known group of parameters fits"):
        ckpt.open(run)


@pytest.mark.parametrize("name", RUNS)
def test_files_of_ranks(copied: Callable[[str], Path], name: str) -> None:
    run = copied(name)
    kept = (run / FILE.format(2)).read_bytes()
    (run / FILE.format(2)).unlink()
    with pytest.raises(IncompleteError, match="rank files are missing"):
        ckpt.open(run)
    (run / FILE.format(2)).write_bytes((run / FILE.format(1)).read_bytes())
    with pytest.raises(CorruptError, match="saved under another name"):
        ckpt.open(run)
    (run / FILE.format(2)).write_bytes(kept)
    (run / FILE.format(1)).rename(run / FILE.format(3))
    with pytest.raises(CkptError, match=r"saved under another name|missing or exchanged"):
        ckpt.open(run)
