"""A model and an optimizer from two saves.

An optimizer ahead of the model proves it. An optimizer behind the model may have been restarted, if only weights were
loaded. Then the fp32 masters still round to the model's weights. HF Trainer also counts steps skipped after an
overflow, so its optimizer may be behind.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import IncompleteError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import whole
from ckpt.runs.steps import recorded_number, trainer_step

#: Number of compared parameters, the largest, and their maximum size.
_COMPARED, _MAX_ELEMENTS = 2, 1 << 22


def check_one_save(checkpoint: Checkpoint) -> None:
    what = different_steps(checkpoint) if checkpoint.state.step is not None else ""
    if what and (_optimizer_steps(checkpoint) > (checkpoint.state.step or 0) or _weights_differ(checkpoint)):
        raise IncompleteError(what, path=checkpoint.path)


def different_steps(checkpoint: Checkpoint) -> str:
    """Return a sentence about different step counts of a model and its optimizer, or "".

    Outside ZeRO stages 1 to 3, only an optimizer ahead of HF Trainer's or Lightning's record counts. Under ZeRO, an
    optimizer ahead by one step counts only if its masters contradict the weights.
    """
    state = checkpoint.state
    taken = _optimizer_steps(checkpoint)
    skipped = state.skipped_steps if type(state.skipped_steps) is int else 0
    path = Path(checkpoint.path)
    step = recorded_number(path) if state.step is None and path.is_dir() else state.step
    if step is None or taken < 0:
        return ""
    is_more = taken > step and (state.step is None or trainer_step(path) is not None)
    if not is_more and (state.zero_stage is None or taken == step - skipped):
        return ""
    if state.zero_stage is not None and taken == step - skipped + 1 and not _weights_differ(checkpoint):
        return ""  # DeepSpeed's BF16_Optimizer (0.19.8, bf16_optimizer.py) takes a first step without gradients
    return f"the model is from step {step}, but the optimizer has taken {taken:g}: are all files from one save?"


def _optimizer_steps(checkpoint: Checkpoint) -> float:
    """Return -1 if the number is not recorded."""
    return float(max(checkpoint.state.scalars.get("step", {}).values(), default=-1))


def _weights_differ(checkpoint: Checkpoint) -> bool:
    """Return True if a parameter's fp32 master does not round to its weight."""
    from ckpt.move.casts import cast_bits
    from ckpt.move.reading import read_box

    def bits(fqn: str, role: str) -> bytes:
        tensor = checkpoint.tensors[fqn, role]
        found = read_box(tensor, whole(tensor.shape), checkpoint.computed).ravel()
        return cast_bits(found, tensor.dtype, checkpoint.tensors[fqn, WEIGHT].dtype).tobytes()

    pairs = {
        fqn: tensor.numel
        for (fqn, role), tensor in checkpoint.tensors.items()
        if role == MASTER and tensor.numel <= _MAX_ELEMENTS
        if (weight := checkpoint.tensors.get((fqn, WEIGHT))) is not None and weight.dtype in CAST_SOURCES
    }
    largest = sorted(pairs, key=lambda fqn: -pairs[fqn])[:_COMPARED]
    return any(bits(fqn, MASTER) != bits(fqn, WEIGHT) for fqn in largest)
