"""Hand-made ZeRO checkpoints after runtime/zero/stage_1_and_2.py and stage3.py, independent from the readers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from tests.support.describing import content
from tests.support.engines import raw

#: Masters by fqn: one dict for each param group (stages 1, 2) or sub-group (stage 3).
Groups = Sequence[dict[str, torch.Tensor]]
#: Changes a dict about to be saved: `change(content, rank)`.
Change = Callable[[dict[str, Any], int], None]

STEP = 2
MODEL_NAME = "mp_rank_00_model_states.pt"
RANK_MODEL_NAME = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER_NAME = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class Options(TypedDict, total=False):
    """Changes to a plain run: `change` gets the inner dict of each optimizer file, `name` is their file name."""

    change: Change
    change_model: Change
    name: str
    tag: str


def groups_of(*shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Groups:
    """Return random masters with the given shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [{fqn: torch.randn(shape, generator=generator) for fqn, shape in group.items()} for group in shapes]


def unchanged(content: dict[str, Any], rank: int) -> None:
    """Leave `content` unchanged."""


def write_stage2(
    run: Path, groups: Groups, num_ranks: int, *, alignment: int = 1, stage: int = 2, **options: Unpack[Options]
) -> Path:
    """Write a run folder for stage 1 or 2, with `alignment` in elements."""
    inners: list[dict[str, Any]] = [
        {
            "zero_stage": stage,
            "partition_count": [num_ranks] * len(groups),
            "loss_scaler": None,
            "single_partition_of_fp32_groups": [],
            "group_paddings": [],
            "param_alignment_paddings": [],
            "base_optimizer_state": {"state": {}, "param_groups": []},
            "ds_version": "0.19.8",
        }
        for _ in range(num_ranks)
    ]
    for number, group in enumerate(groups):
        paddings = [-tensor.numel() % alignment for tensor in group.values()]
        if paddings:
            paddings[-1] = 0
        flat = torch.cat(
            [torch.cat([t.reshape(-1), torch.zeros(p)]) for t, p in zip(group.values(), paddings, strict=True)]
        )
        size = -(-len(flat) // (2 * num_ranks)) * 2
        padded = torch.cat([flat, torch.zeros(size * num_ranks - len(flat))])
        for rank, inner in enumerate(inners):
            part = padded[rank * size : (rank + 1) * size]
            kept = min(max(len(flat) - rank * size, 0), size)
            inner["single_partition_of_fp32_groups"].append(part[:kept].clone())
            inner["group_paddings"].append(size - kept)
            inner["param_alignment_paddings"].append(paddings)
            inner["base_optimizer_state"]["state"][number] = _adam(part)
            inner["base_optimizer_state"]["param_groups"].append({"lr": 0.5 / (number + 1), "params": [number]})
    module = OrderedDict((fqn, t.bfloat16()) for group in groups for fqn, t in group.items())
    return _write(run, inners, {MODEL_NAME: _model_file(module, groups, num_ranks)}, **options)


def write_stage3(run: Path, groups: Groups, num_ranks: int, **options: Unpack[Options]) -> Path:
    """Write a stage 3 run folder. Slots are padded with NaN, so any use of the padding shows."""
    inners: list[dict[str, Any]] = []
    models = {}
    for rank in range(num_ranks):
        flats = [torch.cat([slot(t, rank, num_ranks) for t in group.values()]) for group in groups]
        optimizer = {
            "state": {number: _adam(flat) for number, flat in enumerate(flats)},
            "param_groups": [{"lr": 0.5, "params": list(range(len(groups)))}],
        }
        inners.append(
            {
                "zero_stage": 3,
                "partition_count": num_ranks,
                "optimizer_state_dict": optimizer,
                "fp32_flat_groups": flats,
            }
        )
        module = OrderedDict((fqn, torch.empty(0, dtype=torch.bfloat16)) for group in groups for fqn in group)
        models[RANK_MODEL_NAME.format(rank)] = _model_file(module, groups, num_ranks)
    return _write(run, inners, models, **options)


def slot(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return a rank's slot for a stage 3 parameter."""
    size = -(-tensor.numel() // num_ranks)
    part = tensor.reshape(-1)[rank * size : (rank + 1) * size]
    return torch.cat([part, torch.full((size - len(part),), torch.nan, dtype=tensor.dtype)])


def assert_holds(checkpoint: Checkpoint, groups: Groups, states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> None:
    """Assert that the checkpoint has every master and Adam state in `groups`, bit for bit, and no others."""
    expected = {}
    for group in groups:
        for fqn, master in group.items():
            values = _adam(master) | {MASTER: master}
            expected |= {(fqn, role): raw(values[role]) for role in (MASTER, *states)}
    stored = {key: tensor for key, tensor in checkpoint.tensors.items() if key[1] in (MASTER, *states)}
    assert {key: content(tensor) for key, tensor in stored.items()} == expected


def assert_weights(checkpoint: Checkpoint, groups: Groups) -> None:
    """Assert that the checkpoint has every parameter of `groups` in the model's dtype (stages 1 and 2)."""
    for group in groups:
        for fqn, master in group.items():
            assert content(checkpoint.tensors[fqn, WEIGHT]) == raw(master.bfloat16())


def _adam(flat: torch.Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(float(STEP)), "exp_avg": flat * 3, "exp_avg_sq": flat * flat}


def _write(
    run: Path,
    inners: list[dict[str, Any]],
    models: dict[str, dict[str, Any]],
    *,
    change: Change = unchanged,
    change_model: Change = unchanged,
    name: str = OPTIMIZER_NAME,
    tag: str = "global_step2",
) -> Path:
    folder = run / tag
    folder.mkdir(parents=True)
    (run / "latest").write_text(tag)
    for rank, inner in enumerate(inners):
        change(inner, rank)
        torch.save({"optimizer_state_dict": inner, "ds_version": "0.19.8"}, folder / name.format(rank))
    for rank, (model_name, model) in enumerate(models.items()):
        change_model(model, rank)
        torch.save(model, folder / model_name)
    return run


def _model_file(module: OrderedDict[str, torch.Tensor], groups: Groups, num_ranks: int) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((fqn, t.shape) for fqn, t in group.items()) for group in groups],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": STEP,
        "skipped_steps": 0,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
