"""How far a run has come, under the names by which each framework's schedules and data loaders know it.

A checkpoint records the steps taken and most record the sequences seen.  Between DeepSpeed's and torch's schedules on
one side and Megatron's on the other that is all that is carried: the shape of a schedule is the next run's own option.

Format facts: megatron-core 0.16.1 (optimizer_param_scheduler.py), Megatron-LM core_v0.16.1 (training/checkpointing.py,
`load_checkpoint`, which loads no optimizer without `opt_param_scheduler`; training/training.py counts its steps in
sequences), deepspeed 0.19.8 (runtime/lr_schedules.py: -1 before the first step), torch 2.13 (optim/lr_scheduler.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import Checkpoint, TrainingState

#: Entries of a Megatron schedule's state beside its position: what the shape is.
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
    """Sequences consumed so far: DeepSpeed's count, that of a trainer's `train_state`, or Megatron-LM's argument."""
    count = state.global_samples
    for holder, key in ((state.train_state, "sequences"), (state.args, "consumed_train_samples")):
        if count is None and holder is not None:
            count = holder.get(key)
    if isinstance(count, StoredTensor):
        count = read_scalar(count.extent)
    return count if type(count) is int and count >= 0 else None


def with_counted_step(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """With the step that the optimizer has counted, where no other is recorded and all parameters have the same; notes.

    A script of torch's may save the model and the optimizer alone, which is all that `load_state_dict` asks for.
    """
    counts = set(checkpoint.state.scalars.get("step", {}).values())
    count = counts.pop() if len(counts) == 1 else 0
    step = int(count) if type(count) in (int, float) and 0 < count < 2**53 else 0
    if checkpoint.state.step is not None or not step or step != count:
        return checkpoint, ()
    note = f"no step is recorded: it is taken for {step}, which the optimizer has counted for each parameter"
    return replace(checkpoint, state=replace(checkpoint.state, step=step)), (note,)


def megatron_schedule(sequences: int) -> dict[str, Any]:
    """The state of Megatron's schedule after so many sequences.

    With `--override-opt-param-scheduler` its loader takes the position alone; without, it compares the shape with that
    of the run's options, and says so of the first entry that is None here.
    """
    return {"num_steps": sequences, **dict.fromkeys(_SHAPE)}


def deepspeed_schedule(steps: int) -> dict[str, Any]:
    """The state after so many steps of DeepSpeed's own schedules and of torch's: each reads the entries it knows."""
    return {"last_batch_iteration": steps - 1, "last_epoch": steps, "_step_count": steps + 1}
