"""A user's script with transformers' Trainer on forked ranks, with arguments STOP, FOLDER and SCRIPT.

`rows-RANK.jsonl` gets each step's rows.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback


def main() -> None:
    """Run the script as `__main__`."""
    stop = int(sys.argv[1])
    os.chdir(sys.argv[2])
    train, end, check = Trainer.training_step, DefaultFlowCallback.on_step_end, TrainingArguments.__post_init__

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(self.args.output_dir, f"rows-{self.args.process_index}.jsonl").open("a") as file:
            file.write(json.dumps([self.state.global_step + 1, inputs["input_ids"].tolist()]) + "\n")
        return train(self, model, inputs, *args, **kwargs)

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        end(self, args, state, control, **kwargs)
        if state.global_step == stop:
            control.should_training_stop = True
        return control

    def post_init(self: Any) -> None:
        check(self)
        if self.use_cpu and self.fsdp:
            # Accelerate requires GPUs for FSDP. torch's FSDP also runs on gloo, so hide the device from it.
            PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}

    setattr(Trainer, "training_step", training_step)  # noqa: B010
    setattr(DefaultFlowCallback, "on_step_end", on_step_end)  # noqa: B010
    setattr(TrainingArguments, "__post_init__", post_init)  # noqa: B010
    del sys.argv[:3]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
