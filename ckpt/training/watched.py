"""Heartbeats and loss spike detection for any HF Trainer script: `Trainer(..., callbacks=[Watched()])`.

OUTPUT_DIR/heartbeats/      heartbeats for `ckpt watch OUTPUT_DIR`
OUTPUT_DIR/spikes.jsonl     a line for each logged loss spike, also printed on stderr
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
    """Trainer callback with heartbeats every `beat` seconds."""

    def __init__(self, beat: float = 5.0) -> None:
        self.beat, self.spikes = beat, SpikeWatch()
        self.heart: Heart | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        started: list[Any] = [time.time()]
        if dist.is_initialized():
            dist.broadcast_object_list(started)
        self.heart = Heart(Path(args.output_dir), args.process_index, args.world_size, self.beat, started[0])
        self.heart.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("training", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("saving" if control.should_save else "data", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        loss, limit = float((logs or {})["loss"]), self.spikes.limit()
        if self.spikes.is_spike(state.global_step, loss):
            with Path(args.output_dir, "spikes.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, "loss": loss, "limit": limit}) + "\n")
            text = f"the loss spiked in step {state.global_step}: {loss:.4f}, and {limit:.4f} would be usual"
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.heart:
            self.heart.__exit__(None)

    def _enter(self, phase: str, state: Any) -> None:
        if self.heart:
            self.heart.enter(phase, state.global_step)
