"""A run's progress, in the terms of each framework's schedules and data loaders.

Only the counts of steps and sequences convert between Megatron's schedules and DeepSpeed's or torch's. The shape of a
schedule is the next run's own option.

Format facts: megatron-core 0.16.1 (optimizer_param_scheduler.py), Megatron-LM core_v0.16.1 (training/checkpointing.py,
`load_checkpoint`: no optimizer is loaded without `opt_param_scheduler`; training/training.py: steps are counted in
sequences), deepspeed 0.19.8 (runtime/lr_schedules.py: -1 before the first step), torch 2.13 (optim/lr_scheduler.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import Checkpoint, TrainingState

#: Shape entries in a Megatron schedule's state.
_SHAPE = (
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)


def sequences_seen(state: TrainingState) -> int | None:
    """Return the number of sequences, from DeepSpeed, a trainer's `train_state`, or Megatron-LM's arguments."""
    count = state.global_samples
    for holder, key in ((state.train_state, "sequences"), (state.args, "consumed_train_samples")):
        if count is None and holder is not None:
            count = holder.get(key)
    if isinstance(count, StoredTensor):
        count = read_scalar(count.extent)
    return count if type(count) is int and count >= 0 else None


def with_step_count(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Use the optimizer's step count if no step is recorded and all counts agree. Also return notes."""
    counts = set(checkpoint.state.scalars.get("step", {}).values())
    if checkpoint.state.step is not None or not counts or not all(map(_is_count, counts)):
        return checkpoint, ()
    step, *others = sorted(map(int, counts))
    if others:
        return checkpoint, (f"no step is recorded, and the optimizer's counts differ: {step} to {others[-1]}",)
    if not step:
        return checkpoint, ()
    note = f"no step is recorded: using {step}, the optimizer's count for each parameter"
    return replace(checkpoint, state=replace(checkpoint.state, step=step)), (note,)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < 2**53 and value % 1 == 0


def megatron_schedule(sequences: int) -> dict[str, Any]:
    """Return Megatron's schedule state after `sequences` sequences.

    With `--override-opt-param-scheduler`, Megatron's loader only reads the position. Without it, the loader compares
    the shape with its options and reports the first entry that is None here.
    """
    return {"num_steps": sequences, **dict.fromkeys(_SHAPE)}


def deepspeed_schedule(steps: int) -> dict[str, Any]:
    """Return the state for DeepSpeed's and torch's schedules. Each reads the entries it knows.

    torch's LambdaLR and MultiplicativeLR fail without `lr_lambdas`. SequentialLR and ChainedScheduler need more.
    """
    return {"last_batch_iteration": steps - 1, "last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}
