"""`ckpt/state/adam.py`: Adam options missing in one framework's record and required by another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ckpt import api
from ckpt.plan.checkpoint import Checkpoint, Layout, ParamGroup
from ckpt.state import adam

#: deepspeed 0.19.8's record (ops/adam/fused_adam.py; its groups also have a `step`).
FUSED = {"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 0}


def recorded_by_fused_adam(checkpoint: Checkpoint, **ds_config: Any) -> Checkpoint:
    groups = tuple(ParamGroup(group.fqns, dict(FUSED)) for group in checkpoint.state.param_groups)
    config = {**(checkpoint.state.ds_config or {}), **ds_config}
    return replace(checkpoint, state=replace(checkpoint.state, param_groups=groups, ds_config=config))


def test_deepspeeds_adam_loads_into_torchs(fixtures: Path, tmp_path: Path) -> None:
    """Plain `dcp.load` requests each option in the live optimizer."""
    checkpoint = recorded_by_fused_adam(api.open(fixtures / "toy-zero2"), optimizer={"type": "AdamW"})
    conversion = api.plan(checkpoint, "dcp")
    assert any("for Adam options missing" in note and "amsgrad" in note for note in conversion.plan.target.notes)
    conversion.run(tmp_path / "out")
    shapes = {fqn: checkpoint.tensors[fqn, "exp_avg"].shape for fqn, role in checkpoint.tensors if role == "exp_avg"}
    model = torch.nn.Module()
    for fqn, shape in shapes.items():
        owner = model
        for part in fqn.split(".")[:-1]:
            owner.add_module(part, getattr(owner, part, torch.nn.Module()))
            owner = getattr(owner, part)
        owner.register_parameter(fqn.rpartition(".")[2], torch.nn.Parameter(torch.zeros(shape)))
    members = [[model.get_parameter(fqn) for fqn in group.fqns] for group in checkpoint.state.param_groups]
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in members])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group in optimizer.param_groups:
        assert {name: group[name] for name in ("lr", "betas", "weight_decay")} == {
            name: FUSED[name] for name in ("lr", "betas", "weight_decay")
        }
        assert (group["amsgrad"], group["maximize"], group["foreach"], group["fused"]) == (False, False, None, None)
        assert group["decoupled_weight_decay"]


def test_torchs_adam_loads_into_deepspeeds(fixtures: Path, tmp_path: Path) -> None:
    """FusedAdam and CPUAdam look up `bias_correction`, and pass the step to a kernel as an int."""
    for stage in (2, 3):
        output = tmp_path / f"zero{stage}"
        api.plan(api.open(fixtures / "dcp-fsdp2"), f"zero{stage}", Layout(world_size=3)).run(output)
        for file in output.glob("*/*optim_states.pt"):
            saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
            base = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            assert all(group["bias_correction"] is True for group in base["param_groups"])
            assert base["state"] and all(type(state["step"]) is int for state in base["state"].values())


def test_decoupled_weight_decay_is_what_deepspeeds_config_says() -> None:
    def decoupled(optimizer: Any) -> Any:
        return adam.missing_for_torch(FUSED, {"optimizer": optimizer})["decoupled_weight_decay"]

    assert decoupled({"type": "AdamW", "params": {"lr": 1.0}})
    assert decoupled({"type": "Adam"})  # DeepSpeed's Adam is AdamW by default
    assert not decoupled({"type": "Adam", "params": {"adam_w_mode": False}})
    assert decoupled({"type": "AdamW", "params": {"adam_w_mode": False}})
    assert not decoupled(None)
    assert adam.missing_for_torch({**FUSED, "decoupled_weight_decay": True, "amsgrad": True}, None).keys() == {
        "maximize", "foreach", "capturable", "differentiable", "fused",
    }  # fmt: skip


def test_what_is_adam() -> None:
    assert adam.is_adam(FUSED, {"exp_avg", "exp_avg_sq"})
    assert adam.is_adam(FUSED, ())
    assert not adam.is_adam(FUSED, {"exp_avg"})
    assert not adam.is_adam({"lr": 0.1, "betas": (0.9, 0.99)}, {"exp_avg"})
    assert (adam.whole_steps(4.0), adam.whole_steps(4), adam.whole_steps(4.5)) == (4, 4, 4.5)
