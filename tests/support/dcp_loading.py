"""DCP loaded by an unmodified torch engine: `torchrun ... -m tests.support.dcp_loading jobs.jsonl`.

Writes the truth of `resume` to `output/truth.safetensors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from train import launch, models, truth
from train.config import Config
from train.engines.native import NativeEngine


def main() -> None:
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        load(json.loads(line))
    launch.stop()


def load(job: dict[str, Any]) -> None:
    """Load with torch's own recipe: `dcp.load` fills the engine's state dicts, which are set again."""
    # Accelerate's folders hold the model and the optimizer apart
    folders = job.pop("folders", None)
    config = Config(**job)
    assert config.resume
    engine = NativeEngine(models.build_model(config), config)
    options = StateDictOptions(flatten_optimizer_state_dict=config.keys == "flat")
    model, optimizer = get_state_dict(engine.model, engine.optimizer, options=options)
    state = {"model": model, "optimizer": optimizer}
    # The planner's flattening of FSDP1's tensors drops tensors without a part on this rank.
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    if folders is None:
        dcp.load(state, checkpoint_id=config.resume, planner=planner)
    else:
        for name, folder in folders.items():
            dcp.load({name: state[name]}, checkpoint_id=Path(config.resume) / folder, planner=planner)
    set_state_dict(
        engine.model, engine.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"], options=options
    )
    tensors, facts = engine.gather()
    if dist.get_rank() == 0:
        truth.write(Path(config.output), "truth", config, 0, tensors, facts)
    engine.close()
    dist.barrier()


if __name__ == "__main__":
    main()
