"""Large ZeRO-3 checkpoint in DeepSpeed's format, written without training a model.

The structure follows `DeepSpeedZeroOptimizer_Stage3.state_dict` and `DeepSpeedEngine.save_checkpoint` (deepspeed 0.19).
Its objects are DeepSpeed's own.

    python -m benchmarks.zero_source FOLDER NUM_LAYERS [zeros|masters]

`zeros` writes only zeros, which take no disk space; `masters` writes real masters and zeros for Adam's states.
"""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from benchmarks.models import GROUP, NUM_RANKS, STEP, shapes, write_config

TAG = f"global_step{STEP}"


def write(folder: Path, num_layers: int, kind: str = "") -> None:
    write_ranks(folder, shapes(num_layers), NUM_RANKS, kind)
    write_config(folder, num_layers)


def write_ranks(folder: Path, params: Mapping[str, tuple[int, ...]], num_ranks: int, kind: str = "") -> None:
    """Write the step folder and `latest` for a run with Adam's states."""
    length = sum(-(-prod(shape) // num_ranks) for shape in params.values())
    generator = torch.Generator().manual_seed(0)
    for rank in range(num_ranks):
        zeros = torch.zeros(length)  # saved once, though used several times
        master = zeros if kind == "zeros" else torch.randn(length, generator=generator) * 0.02
        moments = [zeros, zeros] if kind else [master * 0.01, master * master]
        file = save_rank(folder, params, rank, num_ranks, master, moments)
        if kind:
            subprocess.run(["fallocate", "--dig-holes", file], check=True)


def save_rank(
    folder: Path,
    params: Mapping[str, tuple[int, ...]],
    rank: int,
    num_ranks: int,
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    *,
    bf16: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a rank's two files, and return the optimizer's. `bf16` is the model's dtype instead of fp32."""
    buffers = buffers or {}
    step_folder = folder / TAG
    step_folder.mkdir(parents=True, exist_ok=True)
    exp_avg, exp_avg_sq = moments
    state = {"step": torch.tensor(float(STEP)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    config = {"bf16": {"enabled": True}} if bf16 else {}
    optimizer = {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": num_ranks,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": [GROUP | {"params": [0]}]},
        "fp32_flat_groups": [master],
    }
    outer = {"optimizer_state_dict": optimizer, "ds_config": config, "ds_version": "0.19.8"}
    torch.save(outer, file := step_folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = {
        "module": OrderedDict(
            [*((name, torch.empty(0, dtype=torch.bfloat16 if bf16 else None)) for name in params), *buffers.items()]
        ),
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in params.items())],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": STEP,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": "0.19.8",
    }
    torch.save(model, step_folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (folder / "latest").write_text(TAG)
    return file


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
