"""Loads by an unmodified framework: `torchrun ... -m tests.support.matrix_loading jobs.jsonl`.

A line has `resume`, `output` for the truth, and `loader`: zero (`load` are arguments), dcp (`folders`), full or hf.
Imports nothing of the converter.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import dcp_loading, fsdp_worker, zero_gathering
from train import launch, models, truth
from train.config import Config
from train.engines.native import NativeEngine


def main() -> None:
    """Run every job in turn, in one process group."""
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        try:
            LOADERS[job.pop("loader")](job)
        except Exception as error:
            error.add_note(f"while loading {line}")
            raise
        gc.freeze()  # finished engines leave no garbage, so later collections can skip their objects
    assert "ckpt" not in sys.modules and "converters" not in sys.modules
    launch.stop()


def into_deepspeed(job: dict[str, Any]) -> None:
    zero_gathering.gather(job, job.pop("load", {}), refused=False)


def from_full(job: dict[str, Any]) -> None:
    config = Config(**job)
    assert config.resume
    engine = NativeEngine(models.build_model(config), config)
    fsdp_worker.load(engine.model, engine.optimizer, Path(config.resume))
    tensors, facts = engine.gather()
    if dist.get_rank() == 0:
        truth.write(Path(config.output), "truth", config, 0, tensors, facts)
    engine.close()
    dist.barrier()


def into_transformers(job: dict[str, Any]) -> None:
    """Load parameters with `dtype="auto"`. No key may be missing, unexpected or have another shape."""
    from transformers import AutoModelForCausalLM

    config = Config(**job)
    if dist.get_rank() == 0:
        model, info = AutoModelForCausalLM.from_pretrained(config.resume, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        tensors = {f"weight/{fqn}": parameter for fqn, parameter in model.named_parameters()}
        tensors |= {f"buffer/{fqn}": buffer for fqn, buffer in truth.persistent_buffers(model).items()}
        truth.write(Path(config.output), "truth", config, 0, tensors, {"ties": truth.ties(model)})
    dist.barrier()


LOADERS = {"zero": into_deepspeed, "dcp": dcp_loading.load, "full": from_full, "hf": into_transformers}

if __name__ == "__main__":
    main()
