"""`ckpt/plan/checkpoint.py`: run state shared between formats, by field name."""

from __future__ import annotations

from typing import Any

from ckpt.plan.checkpoint import TrainingState

ENTRIES: dict[str, Any] = {
    "lr_scheduler": {"last_epoch": 3},
    "global_samples": 48,
    "ds_config": {"bf16": {"enabled": True}},
    "overflow": False,
    "checkpoint_version": 3.0,
    "dataloader": b"state",
}


def test_entries_are_fields_or_private_to_whose_they_are() -> None:
    state = TrainingState.of_entries("torch", ENTRIES, step=3)
    assert (state.engine, state.step, state.global_samples) == ("torch", 3, 48)
    assert (state.lr_scheduler, state.ds_config) == (ENTRIES["lr_scheduler"], ENTRIES["ds_config"])
    assert state.private == {
        "deepspeed": {"overflow": False},
        "megatron": {"checkpoint_version": 3.0},
        "torch": {"dataloader": b"state"},
    }
    assert state.entries() == ENTRIES
    assert TrainingState.of_entries("torch", state.entries(), step=3) == state


def test_an_entry_that_is_not_what_its_field_means_is_private() -> None:
    state = TrainingState.of_entries("torch", {"args": ["--lr", "1"], "ds_config": None})
    assert state.args is state.ds_config is None
    assert state.private == {"torch": {"args": ["--lr", "1"], "ds_config": None}}


def test_nothing_is_lost_where_a_name_is_taken() -> None:
    state = TrainingState.of_entries(
        "torch", {"args": {"lr": 1}, "rng_state": b"mine"}, args={"lr": 2}, per_rank={"rng_state": {"0": b"0"}}
    )
    assert state.entries() == {
        "args": {"lr": 2},
        "rng_state": {"0": b"0"},
        "torch.args": {"lr": 1},
        "torch.rng_state": b"mine",
    }


def test_what_is_known_to_be_missing_is_taken_from_the_entries() -> None:
    assert TrainingState.of_entries("megatron", {"grad_scaler": {"scale": 2.0}}, grad_scaler=None).private == {}
