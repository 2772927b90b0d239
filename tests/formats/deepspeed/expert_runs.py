"""DeepSpeed's engine around MoE layers.

Run `python -m tests.formats.deepspeed.expert_runs save|load FOLDER` on each rank. The state before and after the third
step goes to FOLDER/NAME...-{before,after}.safetensors.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fixtures.make_experts import build, fill, gathered
from train import launch

#: Stage of each run, and True for bf16.
RUNS = {"zero1": (1, False), "zero2": (2, True)}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    launch.start()
    if what == "save":
        for name in RUNS:
            engine = _engine(name, 2)
            for step in range(2):
                _step(engine, step)
            engine.save_checkpoint(str(folder / name))
            _hold(engine, name, folder / name)
    else:
        for path in sorted(folder.glob(f"*-on-{dist.get_world_size()}")):
            name, ep_size = re.fullmatch(r"(.+)-ep-(\d+)-on-\d+", path.name).groups()  # type: ignore[union-attr]
            engine = _engine(name, int(ep_size))
            loaded, _ = engine.load_checkpoint(str(path))
            assert loaded is not None
            _hold(engine, name, path)
    launch.stop()


def _engine(name: str, ep_size: int) -> Any:
    stage, is_bf16 = RUNS[name]
    model = build((ep_size, ep_size), balance=0.0, drop_tokens=False)  # both depend on the tokens of a rank
    fill(model, dist.get_rank())
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": is_bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.01}},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _step(engine: Any, step: int) -> None:
    batch = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(step))
    engine.backward(engine(batch.chunk(dist.get_world_size())[dist.get_rank()]))
    engine.step()


def _hold(engine: Any, name: str, path: Path) -> None:
    """Write the engine's state before and after the third step."""
    for when in ("before", "after"):
        if when == "after":
            _step(engine, 2)
        held = gathered(engine, engine.optimizer, RUNS[name][0])
        if dist.get_rank() == 0:
            save_file(held, path.with_name(f"{path.name}-{when}.safetensors"))
    engine.destroy()


if __name__ == "__main__":
    main()
