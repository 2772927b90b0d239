"""Half checkpoints: optimizer states without the model of the same save. No engine can resume from one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckpt.adapters.names import ADAPTER_CONFIG
from ckpt.base.errors import CkptError, CorruptError, HalfError, IncompleteError
from ckpt.base.words import joined
from ckpt.containers.torchfile import read as torchfile
from ckpt.move.files import confined
from ckpt.move.listing import folders_in, names_in
from ckpt.plan import registry
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, Format, ReadRequest
from ckpt.runs.steps import ANY_STEP, LATEST, LEROBOTS_STATE, TRAINER_STATE, TRAINER_STEP, has_trainer_state
from ckpt.runs.unread_files import holds_tensors, may_hold_tensors

#: From HF Trainer, Accelerate, Megatron-LM and LeRobot.
OPTIMIZER_FILE = re.compile(
    r"(?:optimizer(?:_\d+)?|distrib_optim)\.(?:pt|bin)|optim(?:izer)?(?:_states?)?\.safetensors"
)
MODEL_FILE = re.compile(r"(?:adapter_|pytorch_)?model\.(?:safetensors|bin)(?:\.index\.json)?")
_OPTIMIZER_FOLDER = re.compile(r"optim(?!al|ized)|^opt$|^dist_ckpt$|^training_state$")
_FULL_OPTIMIZER = "optimizer.bin"
_MAX_SHOWN = 8  # names per message
_MAX_FOLDERS = 50  # folders searched for the model


def check_holds_model(checkpoint: Checkpoint) -> None:
    """Raise HalfError for optimizer states without a model, CorruptError for a checkpoint without tensors."""
    if holds_model(checkpoint):
        return
    if not (checkpoint.optimizer_states or checkpoint.state.param_groups or checkpoint.unread):
        raise CorruptError("the checkpoint has no tensors", path=checkpoint.path)
    raise with_hint(optimizer_alone(Path(checkpoint.path)), {fqn for fqn, _ in checkpoint.tensors})


def holds_model(checkpoint: Checkpoint) -> bool:
    return any(role in MODEL_ROLES for _, role in checkpoint.tensors)


def lost_weights(path: Path) -> CkptError | None:
    """Return the error if the files' checkpoint lacks weights.

    HF Trainer writes weights before its record of a step, and PEFT before an adapter's config.
    """
    names = names_in(path) if path.is_dir() else [path.name]
    state = path / LEROBOTS_STATE
    if any(map(OPTIMIZER_FILE.fullmatch, [*names, *(names_in(state) if state.is_dir() else ())])):
        return with_hint(optimizer_alone(path))
    if not path.is_dir() or may_hold_tensors(path):
        return None
    found = f"{', '.join(names[:_MAX_SHOWN])}{', ...' if len(names) > _MAX_SHOWN else ''}"
    if ADAPTER_CONFIG in names:
        expected = f"adapter_model.safetensors next to {ADAPTER_CONFIG}"
        return IncompleteError("the adapter's weights are missing", path=path, expected=expected, found=found)
    if TRAINER_STEP.fullmatch(path.name) and has_trainer_state(path):
        expected = f"the model's files, written by HF Trainer before {TRAINER_STATE}"
        return IncompleteError("the step's weights are missing", path=path, expected=expected, found=found)
    return None


def check_is_no_optimizer(checkpoint: Checkpoint) -> None:
    """Raise HalfError if readers took an optimizer's file for a model."""
    files = [Path(file.path) for file in checkpoint.files if holds_tensors(file.path)]
    if files and not checkpoint.optimizer_states and all(OPTIMIZER_FILE.fullmatch(file.name) for file in files):
        raise optimizer_alone(Path(checkpoint.path))


def lost_optimizer(path: Path) -> str:
    """Return a sentence for a step of HF Trainer or Accelerate with a schedule and no optimizer, or ""."""
    names = names_in(path) if path.is_dir() and ANY_STEP.fullmatch(path.name) else []
    if any("optim" in name or ANY_STEP.fullmatch(name) for name in names):
        return ""
    if "scheduler.bin" in names and LATEST not in names:  # DeepSpeed's engine holds its optimizer
        return "the optimizer is missing: Accelerate saves scheduler.bin with one"
    if not TRAINER_STEP.fullmatch(path.name) or TRAINER_STATE not in names or "scheduler.pt" not in names:
        return ""
    return "optimizer.pt is missing: HF Trainer saves scheduler.pt only with an optimizer"


def lost_model_of_fsdp(step: Path) -> str:
    """Return the name of Accelerate's model file if a step has only its optimizer.

    FSDP's optimizer has the parameters' names. Others count parameters, and their model may be an adapter.
    """
    names = names_in(step) if step.is_dir() else []
    if _FULL_OPTIMIZER not in names or any(name.startswith("pytorch_model") for name in names):
        return ""
    try:
        root = torchfile.read(confined(step, _FULL_OPTIMIZER)).root
    except CkptError:  # reported with its file
        return ""
    states = root.get("state") if isinstance(root, dict) else None
    is_named = isinstance(states, dict) and any(isinstance(key, str) for key in states)
    return "pytorch_model_fsdp.bin" if is_named else ""


def optimizer_alone(path: Path, expected: str = "a model") -> HalfError:
    what = "folder" if path.is_dir() else "file"
    return HalfError(f"this {what} has only optimizer states", path=path, expected=expected)


def with_hint(error: HalfError, trained: Collection[str] = ()) -> HalfError:
    """Add the model's place to `error`, unless it has a hint at another step."""
    model = next(_models_around(Path(error.path or ""), {*trained}), None)
    if model is not None:
        place = f"the model is in {model}: give that {'folder' if model.is_dir() else 'file'}"
        error.hint = joined("; ", [place, *([error.hint] if error.hint else [])])
    elif error.hint is None:
        error.hint = "give the folder with this save's model, or a whole step"
    return error


def _models_around(path: Path, trained: set[str]) -> Iterator[Path]:
    """Yield places with the model for `path`.

    A step inside another one, like `checkpoint-2/global_step2`, has the model's file next to it. Other steps hold other
    models.
    """
    if path.is_file():
        places = [path.parent]
    elif ANY_STEP.fullmatch(path.name) and ANY_STEP.fullmatch(path.parent.name):
        places = [path.parent / name for name in names_in(path.parent) if MODEL_FILE.fullmatch(name)]
    else:
        is_optimizers = _OPTIMIZER_FOLDER.search(path.name) is not None
        beside = folders_in(path.parent) if is_optimizers else []
        places = [one for one in (*folders_in(path), *beside) if one != path and not ANY_STEP.fullmatch(one.name)]
        places += [path.parent] if is_optimizers else []  # transformers' save_optimizer_distributed
    for place in islice(places, _MAX_FOLDERS):
        with suppress(CkptError):
            found = _checkpoint_of(place)
            if found and holds_model(found) and trained <= {fqn for fqn, role in found.tensors if role in MODEL_ROLES}:
                yield place


def _checkpoint_of(folder: Path) -> Checkpoint | None:
    one = next(formats_of(folder), None)
    return one.read(folder, ReadRequest()) if one else None


def is_checkpoint(folder: Path) -> bool:
    """Return True if `folder` itself is a checkpoint, not a run folder."""
    return any(True for _ in formats_of(folder))


def formats_of(folder: Path) -> Iterator[Format]:
    for one in registry.all_formats():
        with suppress(CkptError):
            if one.reads and one.find(folder, None) == folder:
                yield one
