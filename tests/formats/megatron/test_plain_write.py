"""`converters/megatron/dist/plain_write.py`: `torch_dcp` and `fsdp_dtensor` from other forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.containers.dcp.metadata import read_metadata
from ckpt.errors import LossError, UsageError
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, Layout
from tests.support import commands
from tests.support.describing import content
from tests.support.places import FIXTURES

FORMS = ("torch_dcp", "fsdp_dtensor")
RUN, FSDP2, OWN = FIXTURES / "megatron-lm", FIXTURES / "megatron-torch-dcp", FIXTURES / "megatron-fsdp"
STEP = "iter_0000002"


def keys(folder: Path) -> set[str]:
    return set(read_metadata(folder / STEP).keys)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_as_the_run(form: str, tmp_path: Path) -> None:
    done = commands.ckpt("convert", "auto", "megatron-dist", RUN, "-o", tmp_path / "out", "--ckpt-format", form, "-v")
    assert done.code == 0 and f"Megatron, {form}" in done.err
    assert commands.ckpt("verify", RUN, tmp_path / "out").code == 0
    known, found = ckpt.open(RUN), ckpt.open(tmp_path / "out")
    states = {key for key, tensor in known.tensors.items() if key[1] != "weight" or (key[0], "master") not in known}
    assert {key: content(found.tensors[key]) for key in states} == {key: content(known.tensors[key]) for key in states}
    assert found.state.per_rank["rng_state"].keys() == {"shard_0.0_1.1"}
    assert found.state.scalars["step"] == known.state.scalars["step"]
    assert found.state.entries()["opt_param_scheduler"] == known.state.entries()["opt_param_scheduler"]
    assert known.bound_to_ranks and not found.bound_to_ranks  # the run was saved as dp_reshardable
    args = found.state.args or {}
    assert (args["ckpt_format"], args["expert_model_parallel_size"], args["world_size"]) == (form, 1, 4)


def test_nothing_is_missing_that_a_live_engine_asked_for(tmp_path: Path) -> None:
    """Loading asks for every key in the state dict, and Megatron-LM's own files of the model have them."""
    ckpt.convert(RUN, "megatron-dist", tmp_path / "dcp", ckpt_format="torch_dcp")
    assert keys(FSDP2) <= keys(tmp_path / "dcp")
    ckpt.convert(OWN, "megatron-dist", tmp_path / "fsdp", ckpt_format="fsdp_dtensor")
    assert keys(OWN) <= keys(tmp_path / "fsdp")


@pytest.mark.parametrize("source", [FSDP2, OWN])
def test_what_is_written_of_them_for_torch_dist_is_of_no_fsdp(source: Path, tmp_path: Path) -> None:
    ckpt.convert(source, "megatron-dist", tmp_path / "out")
    args = ckpt.open(tmp_path / "out").state.args or {}
    assert args["ckpt_format"] == "torch_dist" and not (args.get("use_torch_fsdp2") or args.get("use_megatron_fsdp"))


def test_a_loss_scale_is_written_or_said_to_be_left_out() -> None:
    run = ckpt.open(RUN)
    scaled = replace(run, state=replace(run.state, grad_scaler={"scale": 1024.0}))
    dropped = {form: ckpt.plan(scaled, "megatron-dist", Layout(ckpt_format=form)).plan.target.dropped for form in FORMS}
    assert not any("grad_scaler" in line for line in dropped["torch_dcp"])
    assert any("grad_scaler" in line for line in dropped["fsdp_dtensor"])


def test_masters_without_states_are_the_parameters(tmp_path: Path) -> None:
    """SGD leaves such masters."""
    run = ckpt.open(RUN)
    held = {key: tensor for key, tensor in run.tensors.items() if key[1] in MODEL_ROLES}
    ckpt.convert(replace(run, tensors=held), "megatron-dist", tmp_path / "out", ckpt_format="fsdp_dtensor")
    found = ckpt.open(tmp_path / "out").tensors
    masters = [key for key in held if key[1] == MASTER]
    assert masters and all(content(found[key]) == content(held[key]) for key in masters)


def test_weights_alone_become_parameters_in_fp32(tmp_path: Path) -> None:
    jp = FIXTURES / "megatron-llm-jp"
    ckpt.convert(jp / "run", "hf", tmp_path / "hf", config=jp / "llm-jp" / "llm-jp-4-moe")
    source = ckpt.open(tmp_path / "hf")
    ckpt.convert(source, "megatron-dist", tmp_path / "out", ckpt_format="fsdp_dtensor")
    found = ckpt.open(tmp_path / "out")
    assert {role for _, role in found.tensors} == {"master"}
    ckpt.convert(tmp_path / "out", "hf", tmp_path / "again", config=tmp_path / "hf")
    again = ckpt.open(tmp_path / "again")
    assert {key: content(tensor) for key, tensor in again.tensors.items()} == {
        key: content(tensor) for key, tensor in source.tensors.items()
    }


@pytest.mark.parametrize(
    ("source", "layout", "error", "said"),
    [
        (RUN, {"ckpt_format": "torch_dcp", "tp": 2}, UsageError, "tensor, pipeline and expert parallel size 1"),
        (RUN, {"ckpt_format": "fsdp_dtensor", "ep": 2}, UsageError, "expert parallel size 1"),
        (FSDP2, {"ckpt_format": "torch_dcp"}, LossError, "always needs optimizer and random states"),
        (
            FIXTURES / "megatron-bridge" / "canonical-tp2",
            {"ckpt_format": "torch_dcp"},
            UsageError,
            "can't hold an adapter",
        ),
    ],
)
def test_refusals(source: Path, layout: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ckpt.plan(ckpt.open(source), "megatron-dist", Layout(**layout))
