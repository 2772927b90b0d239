"""An unmodified DeepSpeed engine loads `resume`: `torchrun ... -m tests.support.zero_gathering jobs.jsonl`.

`output` gets the truth, `load` are arguments, `refused` expects an error on all ranks.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train import launch, models, truth
from train.config import Config
from train.engines.zero import ZeroEngine


def main() -> None:
    """Run every job in turn, in one process group."""
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        gather(job, job.pop("load", {}), job.pop("refused", False))
        gc.freeze()  # finished engines leave no garbage, so later collections can skip their objects
    launch.stop()


def gather(job: dict[str, Any], load: dict[str, Any], refused: bool) -> None:
    """Load with plain `load_checkpoint`, and write the truth gathered by the engine."""
    config = Config(**job)
    assert config.resume
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    engine = ZeroEngine(models.build_model(config), config)
    try:
        path, client = engine.engine.load_checkpoint(config.resume, **load)
    except (KeyError, RuntimeError, ValueError) as error:
        if not refused:
            raise
        (output / "refused.txt").write_text(f"{type(error).__name__}: {error}")
    else:
        assert path is not None and not refused
        tensors, facts = engine.gather()
        facts |= {"client_state": sorted(client), "sequences": engine.sequences}
        if dist.get_rank() == 0:
            truth.write(output, "truth", config, engine.step, tensors, facts)
    engine.close()
    dist.barrier()


if __name__ == "__main__":
    main()
