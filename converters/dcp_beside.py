"""Which folders a DCP checkpoint is written into, and the files that stand beside it.

A step of HF Trainer or Accelerate stays one: `pytorch_model_fsdp_0/` and `optimizer_0/`, with the step's other files
(`trainer_state.json`, scheduler, random states) copied, so that the unmodified trainer resumes from it (accelerate
1.15, `utils/fsdp_utils.py`).  Anything else becomes one folder, with the model's config and tokenizer in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.checkpoint import Checkpoint, TargetFile
from ckpt.companions import CONFIG, companions, find_config, run_files
from ckpt.dtypes import DType
from ckpt.files import confined, translate_os_errors
from converters.dcp_folder import MODEL_0, OPTIMIZER_0, parts
from converters.run_companions import run_companions

#: Files that only a trainer's step has (transformers/trainer.py, accelerate/checkpointing.py).
_OF_A_STEP = ("trainer_state.json", "random_states_0.pkl")
_OF_DEEPSPEED = ("zero_to_fp32.py", "zero_to_torch.py")


@dataclass(frozen=True, slots=True)
class Beside:
    """The prefixes of the folders to be written, model first; files beside them; what is left behind, and notes."""

    prefixes: tuple[str, ...]
    files: tuple[TargetFile, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def beside_files(checkpoint: Checkpoint, num_ranks: int, dtype: DType | None) -> Beside:
    """Where a checkpoint's parts go, and what stands beside them."""
    home = _step_folder(checkpoint)
    if home is None:
        files = _of_the_model([Path(folder) for folder in checkpoint.folders])
        left = run_files(checkpoint.folders)
        return Beside(("",), files, (f"files of the run {', '.join(left)}",) if left else (), ())
    # the step's files are looked for around the checkpoint's own folder
    inside = replace(checkpoint, path=str(next(p for p in sorted(home.iterdir()) if p.is_dir())))
    found = run_companions(inside, num_ranks, dtype)
    kept = tuple(file for file in found.files if file.name not in _OF_DEEPSPEED)
    return Beside((f"{MODEL_0}/", f"{OPTIMIZER_0}/"), kept, found.dropped, found.notes)


def _step_folder(checkpoint: Checkpoint) -> Path | None:
    """The folder of the trainer's step that the checkpoint is, or lies in."""
    path = Path(checkpoint.path)
    if checkpoint.format == "dcp" and path.is_dir() and parts(path).is_pair:
        return path
    home = path.parent if str(path.parent) in checkpoint.folders else path
    with translate_os_errors(home):
        if home.is_dir() and any((home / name).exists() for name in _OF_A_STEP):
            return home if any(p.is_dir() for p in home.iterdir()) else None
    return None


def _of_the_model(folders: list[Path]) -> tuple[TargetFile, ...]:
    found = {companion.name: companion.content for companion in companions(folders)}
    path = find_config(folders)
    if path is not None:
        with translate_os_errors(path):
            found[CONFIG] = confined(path.parent, path.name).read_bytes()
    return tuple(TargetFile.of_bytes(name, content) for name, content in sorted(found.items()))
