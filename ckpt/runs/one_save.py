"""Files of two saves in one folder: a model and its optimizer that count different steps.

A save into a reused folder that was cut off leaves these.  An optimizer of a later step than the model proves it.  One
that has taken fewer steps may have begun anew, if only weights were loaded: then the fp32 masters still round to the
model's weights.  HF Trainer counts steps that an overflow made void, so its optimizer may have taken fewer.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import IncompleteError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import whole
from ckpt.runs.steps import trainer_step

#: Parameters compared, the largest of at most this many elements.
_COMPARED, _MAX_ELEMENTS = 2, 1 << 22


def check_one_save(checkpoint: Checkpoint) -> None:
    """Raise IncompleteError if the optimizer is of another save than the model."""
    what = different_steps(checkpoint)
    if what and (_taken(checkpoint) > (checkpoint.state.step or 0) or _weights_differ(checkpoint)):
        raise IncompleteError(what, path=checkpoint.path)


def different_steps(checkpoint: Checkpoint) -> str:
    """Return a sentence if a model and its optimizer count different steps, or "".  ZeRO's stage 0 counts otherwise."""
    state = checkpoint.state
    taken = _taken(checkpoint)
    skipped = state.skipped_steps if type(state.skipped_steps) is int else 0
    if state.step is None or taken < 0:
        return ""
    is_more = taken > state.step and trainer_step(Path(checkpoint.path)) is not None
    if not is_more and (state.zero_stage is None or taken == state.step - skipped):
        return ""
    return f"the model is of step {state.step}, and the optimizer has taken {taken:g}: are all files of one save?"


def _taken(checkpoint: Checkpoint) -> float:
    """Return the number of steps taken by the optimizer, or -1 if it does not count."""
    return float(max(checkpoint.state.scalars.get("step", {}).values(), default=-1))


def _weights_differ(checkpoint: Checkpoint) -> bool:
    """Return True if a parameter's fp32 master does not round to its weight, as it does after every step."""
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
