"""Heartbeats and a look-out for spikes in any script of HF Trainer: `Trainer(..., callbacks=[Watched()])`.

OUTPUT_DIR/heartbeats/      signs of life, for `python -m ckpt.training.watch OUTPUT_DIR`
OUTPUT_DIR/spikes.jsonl     a line for each logged loss that was a spike, which is also said on stderr
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from ckpt.training.heartbeat import Heart
from ckpt.training.spikes import SpikeWatch


class Watched(TrainerCallback):  # type: ignore[misc]
    """One run's; `beat` is in seconds. A rank that ends with an error beats no more, which the watcher sees."""

    def __init__(self, beat: float = 5.0) -> None:
        self.beat, self.spikes = beat, SpikeWatch()
        self.heart: Heart | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called once, in every rank."""
        started: list[Any] = [time.time()]
        if dist.is_initialized():
            dist.broadcast_object_list(started)
        self.heart = Heart(Path(args.output_dir), args.process_index, args.world_size, self.beat, started[0])
        self.heart.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before every optimizer step."""
        self._enter("training", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after every optimizer step, and before a checkpoint."""
        self._enter("saving" if control.should_save else "data", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called where Trainer logs, as args.logging_steps say."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        loss, limit = float((logs or {})["loss"]), self.spikes.limit()
        if self.spikes.is_spike(state.global_step, loss):
            with Path(args.output_dir, "spikes.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, "loss": loss, "limit": limit}) + "\n")
            text = f"the loss spiked in step {state.global_step}: {loss:.4f}, and {limit:.4f} would be usual"
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called once, when all is done."""
        if self.heart:
            self.heart.__exit__(None)

    def _enter(self, phase: str, state: Any) -> None:
        if self.heart:
            self.heart.enter(phase, state.global_step)
