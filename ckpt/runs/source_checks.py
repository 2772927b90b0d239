"""Checks of a checkpoint that was just read: does it hold elements, optimizer states, and one save?

Placeholders: under ZeRO-3 and FSDP, a rank's module holds empty tensors of shape [0] unless the weights are gathered.
Some models and optimizers are empty on purpose, so empty parameters and missing states are only reported: torch's
optimizers create states at the first gradient.

Two saves: an optimizer ahead of the model proves it. An optimizer behind the model may have been restarted, if only
weights were loaded. Then the fp32 masters still round to the model's weights. HF Trainer also counts steps skipped
after an overflow, so its optimizer may be behind, and its schedule is as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, IncompleteError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile import read as torchfile
from ckpt.move.files import confined
from ckpt.plan import registry
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, WEIGHT, Checkpoint, ReadRequest
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import whole
from ckpt.runs.steps import (
    SCHEDULE,
    TRAINER_STATE,
    contradicting_folder,
    recorded_number,
    run_at,
    step_number,
    trainer_step,
    trainer_steps,
)

_PLACEHOLDER = (0,)
#: Modules use these suffixes for a tensor with shape [0] only next to other empty tensors.
_PARAMETERS = ("weight", "bias")
_GATHER = (
    "set stage3_gather_16bit_weights_on_model_save (Accelerate: zero3_save_16bit_model) to save whole weights, "
    "or give the folder of the DeepSpeed checkpoint (global_stepN)"
)
#: LeRobot's names in `rng_state.safetensors` and `optimizer_state.safetensors` (lerobot 0.4.4).
_TRAINING_STATE = re.compile(r"(?:py|np|torch)(?:_cuda)?_rng_\w+|state/\d+/\w+")
_DIGITS = re.compile(r"\d+")


def check_has_elements(checkpoint: Checkpoint) -> None:
    """Raise IncompleteError if the model has no element, or has empty placeholders as weights.

    Placeholders are allowed if the format's files record shapes. Raise CorruptError for a trainer's random or optimizer
    state in place of the model.
    """
    names = [fqn for fqn, role in checkpoint.tensors if role in MODEL_ROLES]
    if names and all(map(_TRAINING_STATE.fullmatch, names)):
        what = "these tensors are a trainer's random or optimizer state, not a model: were two files exchanged?"
        raise CorruptError(what, path=checkpoint.path, fqn=names[0])
    are_empty = [0 in tensor.shape for (_, role), tensor in checkpoint.tensors.items() if role in MODEL_ROLES]
    if len(are_empty) > 1 and all(are_empty) and not _placeholders(checkpoint):
        what = f"none of {pluralize(len(are_empty), 'tensor')} has an element: these are not weights"
        raise IncompleteError(what, path=checkpoint.path, fqn=next(iter(checkpoint.tensors))[0])
    if registry.get(checkpoint.format).records_shapes or not (empty := _placeholders(checkpoint)):
        return
    place = _checkpoint_with_weights(Path(checkpoint.path), empty)
    what = f"{len(empty)} of {pluralize(len(names), 'tensor')} {'are' if len(empty) > 1 else 'is'} empty: "
    raise IncompleteError(
        f"{what}placeholders of ZeRO-3 or FSDP, saved without the weights"
        if place is None
        else f"{what}ZeRO-3 placeholders; the weights are in {place}",
        path=checkpoint.path,
        fqn=empty[0],
        expected="the elements for each weight",
        found="shape [0]",
        hint=_GATHER if place is None else f"give {place}",
    )


def _placeholders(checkpoint: Checkpoint) -> list[str]:
    shapes = {fqn: tensor.shape for (fqn, role), tensor in checkpoint.tensors.items() if role in MODEL_ROLES}
    empty = [fqn for fqn, shape in shapes.items() if shape == _PLACEHOLDER and not _has_no_rows(fqn, shapes)]
    is_certain = checkpoint.is_adapter or any(fqn.endswith(_PARAMETERS) for fqn in empty)
    return empty if is_certain else []


def _has_no_rows(fqn: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return True for the bias of a layer without outputs."""
    owner, _, name = fqn.rpartition(".")
    return name == "bias" and shapes.get(f"{owner}.weight", (1,))[:1] == (0,) != shapes[f"{owner}.weight"]


def _checkpoint_with_weights(path: Path, names: Collection[str]) -> Path | None:
    """Return the DeepSpeed step with the weights, in the placeholders' folder or next to it."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, *trainer_steps(folder), folder.parent, *trainer_steps(folder.parent)):
        for one in registry.all_formats():
            if one.reads and one.always_has_optimizer and one.loads_from == "run":
                with suppress(CkptError):
                    if (found := one.find(place, None)) and one.read(found, ReadRequest()).holds(names):
                        return found
    return None


_MAX_SHOWN = 3


def empty_parameters(checkpoint: Checkpoint) -> str:
    """Return a sentence on parameters without elements, or "".

    They come from scripts that save one rank's part of FSDP2 parameters, and from ZeRO-3's rank 0 (shape [0]).
    """
    if registry.get(checkpoint.format).records_shapes:
        return ""
    shapes = {
        fqn: tensor.shape
        for (fqn, role), tensor in checkpoint.tensors.items()
        if role in MODEL_ROLES and 0 in tensor.shape and (fqn.endswith(_PARAMETERS) or tensor.shape == (0,))
    }
    if not shapes:
        return ""
    named = [f"{fqn} {list(shape)}" for fqn, shape in [*shapes.items()][:_MAX_SHOWN]]
    have = "has" if len(shapes) == 1 else "have"
    why = "correct only if the model declares empty tensors"
    return f"{pluralize(len(shapes), 'parameter')} {have} no elements ({_shortened(named, len(shapes))}): {why}"


def missing_states(checkpoint: Checkpoint) -> tuple[str, bool]:
    """Return a sentence on trained parameters without optimizer states (or ""), and True if no parameter has any."""
    trained, without = _trained(checkpoint)
    step = checkpoint.state.step
    if not without:
        return "", False
    if len(without) == len(trained):
        why = "all were skipped, or the states are lost"
        if step is None:
            return f"the optimizer has no states: no step was taken, {why}", False
        return (f"the optimizer has no states after {pluralize(step, 'step')}: {why}" if step else ""), True
    have = "has" if len(without) == 1 else "have"
    what = f"{len(without)} of {pluralize(len(trained), 'parameter')} {have} no optimizer state"
    why = "no gradient arrived, or states are lost"
    return f"{what} ({_shortened(without[:_MAX_SHOWN], len(without))}): {why}", False


def _trained(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    if checkpoint.unread or checkpoint.missing_optimizer is not None:
        return [], []
    held = {fqn for fqn, role in checkpoint.tensors if role not in MODEL_ROLES}
    held |= {fqn for values in checkpoint.state.scalars.values() for fqn in values}
    held |= {alias for alias, owner in checkpoint.ties.items() if owner in held}
    held |= {owner for alias, owner in checkpoint.ties.items() if alias in held}
    groups = [
        group
        for group in checkpoint.state.param_groups
        if _keeps_states(group.options) or not held.isdisjoint(group.fqns)
    ]
    trained = list(dict.fromkeys(fqn for group in groups for fqn in group.fqns))
    return trained, [fqn for fqn in trained if fqn not in held]


def _keeps_states(options: Mapping[str, Any]) -> bool:
    """Plain SGD has no states."""
    momentum = options.get("momentum")
    return "betas" in options or (isinstance(momentum, int | float) and momentum > 0)


def _shortened(names: list[str], count: int) -> str:
    return ", ".join([*names, *(["..."] if count > len(names) else [])])


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
    is_less = taken < step == _schedule_steps(state.lr_scheduler) and trainer_step(path) is not None
    if is_less and state.zero_stage is None:  # other scripts may count batches
        what = f"the model and the schedule are from step {step}, but the optimizer has taken {taken:g}"
        return f"{what}: are all files from one save?"
    is_more = taken > step and (state.step is None or trainer_step(path) is not None)
    if not is_more and (state.zero_stage is None or taken == step - skipped):
        return ""
    if state.zero_stage is not None and taken == step - skipped + 1 and not _weights_differ(checkpoint):
        return ""  # DeepSpeed's BF16_Optimizer (0.19.8, bf16_optimizer.py) takes a first step without gradients
    return f"the model is from step {step}, but the optimizer has taken {taken:g}: are all files from one save?"


def step_mismatch(checkpoint: Checkpoint) -> str:
    """Return a sentence if a checkpoint's folder has another number than its files, or "".

    If a trainer's folders may count something else, another folder with this step and the same name must prove it.
    """
    place, step = Path(checkpoint.path), checkpoint.state.step
    if told := contradicting_folder(place, step) or _odd_schedule(checkpoint):
        return told
    if step is None or step_number(place.name) in (None, step):
        return ""
    alike = _DIGITS.sub("", place.name)
    for other in run_at(place.parent).steps:
        if other.number == step and other.path != place and _DIGITS.sub("", other.path.name) == alike:
            with suppress(CkptError):  # reported elsewhere
                if registry.get(checkpoint.format).read(other.path, ReadRequest()).state.step == step:
                    return f"the folder is called {place.name}, but it is from step {step}, like {other.path.name}"
    return ""


def _odd_schedule(checkpoint: Checkpoint) -> str:
    """Return a sentence if HF Trainer's schedule is from another step, whose own schedule counts the run's steps."""
    place, last = Path(checkpoint.path), _schedule_steps(checkpoint.state.lr_scheduler)
    step = checkpoint.state.step
    if last in (None, step) or step != _optimizer_steps(checkpoint) or not (place / SCHEDULE).is_file():
        return ""
    for other in run_at(place.parent).steps:
        if other.number == last and (other.path / SCHEDULE).is_file():
            with suppress(CkptError):  # reported elsewhere
                if _schedule_steps(torchfile.read(confined(other.path, SCHEDULE)).root) == last:
                    what = f"{SCHEDULE} is from step {last}, like {other.path.name}'s"
                    return f"{what}; the optimizer and {TRAINER_STATE} are from step {step}"
    return ""


def _schedule_steps(schedule: Any) -> int | None:
    last = schedule.get("last_epoch") if isinstance(schedule, Mapping) else None
    return last if type(last) is int else None


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
