"""`converters/megatron/dist/fsdp.py`: Megatron-FSDP's `fsdp_dtensor`, other versions and faults."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, NotFoundError
from tests.support import commands
from tests.support.describing import content
from tests.support.engines import Truth, raw
from tests.support.megatron_runs import check_read, without_rounded
from tests.support.places import REPOSITORY

FOLDER = "iter_0000002"
FIXTURE = REPOSITORY / "fixtures" / "megatron-fsdp"
#: MLP rows and vocabulary size of the fixture.
ROWS, VOCABULARY = 7, 259


def held() -> Truth:
    return Truth.load(FIXTURE / "truth" / f"{FOLDER}.safetensors")


def test_reads_what_the_engine_held() -> None:
    checkpoint = ckpt.open(FIXTURE)
    check_read(checkpoint, without_rounded(held()))
    assert (checkpoint.format, checkpoint.world_size) == ("megatron-dist", 3)
    masters = list(checkpoint.with_role("master"))
    assert any(len(list(tensor.fragments())) > 1 for tensor in masters)
    assert {str(tensor.native) for tensor in masters} == {"bfloat16"}
    assert {"args", "opt_param_scheduler", "rng_state", "checkpoint_version"} <= checkpoint.state.entries().keys()
    assert list(checkpoint.state.per_rank["rng_state"]) == ["shard_0.0_1.1"]


def test_the_hub_gets_the_masters_rounded(tmp_path: Path) -> None:
    """The checkpoint lacks the engine's weights. The ranks computed with rounded masters."""
    done = commands.ckpt("convert", "megatron-dist", "hf", FIXTURE, "-o", tmp_path / "hf", "-v")
    assert done.code == 0 and "rounded from the float32 masters" in done.err
    written, expected = ckpt.open(tmp_path / "hf"), held().tensors
    layer = "decoder.layers.0.mlp.linear_fc1.weight", "weight"
    gate, up = (written[f"model.layers.0.mlp.{name}_proj.weight"][...] for name in ("gate", "up"))
    assert raw(torch.cat([gate, up])) == expected[layer] and len(gate) == ROWS
    dtype, (_, size), data = expected["output_layer.weight", "weight"]
    assert raw(written["lm_head.weight"][...]) == (dtype, (VOCABULARY, size), data[: 2 * VOCABULARY * size])


def test_is_told_from_torchs_own(tmp_path: Path) -> None:
    """The names identify it. Opened as `dcp`, it keeps the stored names."""
    shutil.copytree(FIXTURE, tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / FOLDER):
        assert ckpt.open(path).format == "megatron-dist"
    assert ckpt.open(tmp_path / "run" / FOLDER, "dcp").format == "dcp"
    done = commands.ckpt("verify", tmp_path / "run", FIXTURE)
    assert done.code == 0, done.err
    other = saved(tmp_path / "other", {"decoder.layers.0.attention.weight": torch.zeros(2)})  # DDP, for example
    assert ckpt.open(other / FOLDER).format == "dcp"


# -- by hand: forms that can't be written on a CPU, and faults -----------------------------------------------
ARGS = {"num_layers": 1, "bf16": True, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
LAYER = "decoder.layers.0."
GATE, UP = torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(4, 3) + 100
FC1, FC2 = torch.cat([GATE, UP]), torch.arange(12.0).reshape(3, 4)
#: Gate and up rows of the first tensor parallel rank, then of the second.
BY_RANKS = torch.cat([GATE[:2], UP[:2], GATE[2:], UP[2:]])


def saved(folder: Path, model: dict[str, Any], optimizer: dict[str, Any] | None = None, **args: Any) -> Path:
    """Save a run with these model tensors and optimizer entries, and with arguments unless `bare`."""
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {} if args.pop("bare", False) else {"args": Namespace(**{**ARGS, **args})}
    state["iteration"] = 2
    state["model"] = {f"module.{name}": tensor for name, tensor in model.items()}
    if optimizer is not None:
        state["optimizer"] = optimizer
    dcp.save(state, checkpoint_id=folder / FOLDER, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder


def states(**tensors: Any) -> dict[str, Any]:
    """Return optimizer states by parameter name, with two underscores for each dot, and state name."""
    return {"state": {f"module.module.module.{name.replace('__', '.')}": value for name, value in tensors.items()}}


def test_gated_layers_that_are_not_cut_in_halves(tmp_path: Path) -> None:
    """Layers without SwiGLU are stored rank by rank, and experts in megatron-core 0.15 as well."""
    checkpoint = ckpt.open(saved(tmp_path, GATED))
    assert content(checkpoint.tensors[f"{LAYER}mlp.linear_fc1.weight", "master"]) == raw(FC1)
    single = ckpt.open(saved(tmp_path / "single", {**GATED, f"{LAYER}mlp.linear_fc1.weight": FC1[:4]}))
    assert content(single.tensors[f"{LAYER}mlp.linear_fc1.weight", "master"]) == raw(FC1[:4])  # no gate


def test_grouped_experts(tmp_path: Path) -> None:
    """Transformer Engine's experts have bf16 weights, masters as states, and Adam's step in the param group."""
    experts = f"{LAYER}mlp.experts.linear_fc"
    model = {f"{experts}1.weight{e}_{h}": t.bfloat16() for e in (0, 1) for h, t in (("w", GATE + e), ("v", UP + e))}
    model |= {f"{experts}2.weight{e}": FC2.bfloat16() for e in (0, 1)}
    masters = {name: {"master_param": BY_RANKS + int(name[-3]) if "fc1" in name else FC2} for name in model}
    optimizer = {"state": {f"module.module.module.{name}": state for name, state in masters.items()}}
    grouped = {f"module.module.module.{experts}{n}.weight{e}": n for n in (1, 2) for e in (0, 1)}
    options = {"betas": (0.9, 0.95), "step": 5}
    optimizer["param_to_group_meta"] = {name: {**options, "wd_mult": float(n)} for name, n in grouped.items()}
    checkpoint = ckpt.open(saved(tmp_path, model, optimizer, num_experts=2))
    assert [(len(group.fqns), dict(group.options)) for group in checkpoint.state.param_groups] == [
        (2, {**options, "wd_mult": float(n)}) for n in (1, 2)
    ]
    assert list(checkpoint.state.scalars["step"].values()) == [5] * 4
    for expert in (0, 1):
        name = f"{LAYER}mlp.experts.local_experts.{expert}.linear_fc1.weight"
        assert content(checkpoint.tensors[name, "weight"]) == raw((FC1 + expert).bfloat16())
        assert content(checkpoint.tensors[name, "master"]) == raw(FC1 + expert)
        assert len(checkpoint.tensors[name, "master"].replicas) == 1
    assert len(checkpoint.tensors) == 8


DENSE = {f"{LAYER}mlp.linear_fc2.weight": FC2}
GATED = {f"{LAYER}mlp.linear_fc1.weight": BY_RANKS, **DENSE}


def test_without_arguments(tmp_path: Path) -> None:
    """Megatron-Bridge keeps its configuration in a separate file, so nothing identifies the masters."""
    checkpoint = ckpt.open(saved(tmp_path, DENSE, bare=True))
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == {(*DENSE, "weight"): raw(FC2)}
    assert any("no Megatron-LM arguments" in note for note in checkpoint.notes)


FC2_STATE = "decoder__layers__0__mlp__linear_fc2__weight"
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], int, str]] = {
    "experts that overwrite each other": (
        {f"{LAYER}mlp.experts.local_experts.0.linear_fc2.weight": FC2},
        None,
        {"num_experts": 4},
        6,
        "experts are missing",
    ),
    "stages that overwrite each other": (DENSE, None, {"num_layers": 2}, 6, "model layers are missing"),
    "layers without a number": (DENSE, None, {"num_layers": "x"}, 4, "num_layers is not a number"),
    "layers without end": (DENSE, None, {"num_layers": 10**12}, 6, "model layers are missing"),
    "experts without a number": (
        {**DENSE, f"{LAYER}mlp.experts.local_experts.0.linear_fc2.weight": FC2},
        None,
        {"num_experts": [1]},
        4,
        "num_experts is not a number",
    ),
    "legacy experts of one rank": (
        {**DENSE, f"{LAYER}mlp.experts.weight2": FC2},
        None,
        {"expert_model_parallel_size": 2},
        6,
        "only one expert parallel rank's experts",
    ),
    "sinks of one rank": (
        {**DENSE, f"{LAYER}self_attention.core_attention.softmax_offset": torch.zeros(4)},
        None,
        {"num_attention_heads": 8},
        6,
        "only one tensor parallel rank's attention sinks",
    ),
    "a packed layer": (
        {**DENSE, f"{LAYER}self_attention.in_proj.weight": FC2},
        None,
        {},
        3,
        "not supported in Megatron-FSDP checkpoints",
    ),
    "half a layer": ({**DENSE, f"{LAYER}mlp.linear_fc1.weight_w": GATE}, None, {}, 4, "part of a tensor is stored"),
    "gate and up rows of who knows which rank": (GATED, None, {"bare": True}, 6, "tensor parallel rank"),
    "another model's": ({**DENSE, "vision.weight": FC2}, None, {}, 4, "unexpected entry in a Megatron-FSDP checkpoint"),
    "remainders": (
        DENSE,
        states(**{FC2_STATE: {"master_param": torch.zeros(3, 4, dtype=torch.int16)}}),
        {},
        3,
        "scales or remainders",
    ),
    "two masters": (DENSE, states(**{FC2_STATE: {"master_param": FC2}}), {}, 4, "a state's name"),
    "a state of another shape": (
        DENSE,
        states(**{FC2_STATE: {"exp_avg": FC2[:2]}}),
        {},
        4,
        "shape doesn't match its parameter",
    ),
    "a state of no parameter": (DENSE, states(output_layer__weight={"exp_avg": FC2}), {}, 4, "without a parameter"),
    "an optimizer of another kind": (
        DENSE,
        {"param_groups": [{"lr": 0.1}]},
        {},
        3,
        "optimizer state layout is not supported",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    model, optimizer, args, code, said = FAULTS[name]
    run = saved(tmp_path / "run", model, optimizer, **args)
    done = commands.ckpt("convert", "megatron-dist", "megatron-dist", run, "-o", tmp_path / "out")
    assert (done.code, said in done.err) == (code, True), done.err
    assert not (tmp_path / "out").exists()


def test_a_state_dict_without_levels_is_refused(tmp_path: Path) -> None:
    """Megatron-LM's tool creates this form from `torch_dist`. The test builds it by hand."""
    import torch.distributed.checkpoint as dcp

    dcp.save({f"model.module.{name}": tensor for name, tensor in DENSE.items()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(NotFoundError, match="not nested"):
        ckpt.open(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "run")
    (tmp_path / "run" / FOLDER / "__1_0.distcp").unlink()
    with pytest.raises(CorruptError, match="a data file is missing"):
        ckpt.open(tmp_path / "run")
