"""Which folders a DCP checkpoint is written into, and the files that stand beside it.

A step of HF Trainer or Accelerate stays one: `pytorch_model_fsdp_0/` and `optimizer_0/`, with the step's other files
(`trainer_state.json`, scheduler, random states) copied, so that the unmodified trainer resumes from it (accelerate
1.15, `utils/fsdp_utils.py`).  Anything else becomes one folder, with the model's config and tokenizer in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt.containers.dcp.folder import MODEL_0, OPTIMIZER_0, parts
from ckpt.move.files import confined, translate_os_errors
from ckpt.plan.checkpoint import Checkpoint, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.run_folder.carried import DEEPSPEED_SCRIPTS, no_schedule, run_companions, trainer_folder
from ckpt.run_folder.companions import CONFIG, companions, find_config
from ckpt.run_folder.left_out import run_files_left_out


@dataclass(frozen=True, slots=True)
class Beside:
    """The prefixes of the folders to be written, model first; files beside them; what is left behind, and notes."""

    prefixes: tuple[str, ...]
    files: tuple[TargetFile, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def beside_files(checkpoint: Checkpoint, num_ranks: int, dtype: DType | None) -> Beside:
    """Where a checkpoint's parts go, and what stands beside them."""
    path = Path(checkpoint.path)
    is_pair = checkpoint.format == "dcp" and path.is_dir() and parts(path).is_pair
    if trainer_folder(checkpoint) is None and not is_pair:
        files = _of_the_model([Path(folder) for folder in checkpoint.folders])
        return Beside(("",), files, tuple(run_files_left_out(checkpoint)), ())
    found = run_companions(checkpoint, num_ranks, dtype, leave=DEEPSPEED_SCRIPTS)
    notes = (*found.notes, *no_schedule(found.files))
    return Beside((f"{MODEL_0}/", f"{OPTIMIZER_0}/"), found.files, found.dropped, notes)


def _of_the_model(folders: list[Path]) -> tuple[TargetFile, ...]:
    found = {companion.name: companion.content for companion in companions(folders)}
    path = find_config(folders)
    if path is not None:
        with translate_os_errors(path):
            found[CONFIG] = confined(path.parent, path.name).read_bytes()
    return tuple(TargetFile.of_bytes(name, content) for name, content in sorted(found.items()))
