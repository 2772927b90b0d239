"""The folder that `DeepSpeedEngine.save_checkpoint` leaves: step folders, `latest`, and one or two files per rank.

File names: deepspeed/runtime/engine.py, `_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_zero_ckpt_prefix` (0.19).  The
number after `zero_pp_rank_` is the data-parallel rank; the prefix says which precision was enabled and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import counted
from ckpt.move.files import confined
from ckpt.move.listing import folders_in, has_name, names_in
from ckpt.runs.finding import Steps, find_step, newest_first
from ckpt.runs.halves import optimizer_alone
from ckpt.runs.steps import LATEST

#: What users call any of the formats here.
ALIASES = ("deepspeed", "ds")
# The underscore before "optim" is missing in files from before DeepSpeed 0.3.
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL_PER_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
#: Suffix of every file with a part of the model: of all ranks, of one, of an expert, of a pipeline's layer.
_MODEL_SUFFIX = "model_states.pt"
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
PIPELINE_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")


@dataclass(frozen=True)
class StepFolder:
    """The files of one step folder: optimizer files and per-rank model files by data-parallel rank, numerically.

    `model` is the single model file of stages 0 to 2; `experts` are files of MoE layers' experts, by the numbers of
    layer and expert, `experts_optimizer` those of expert parallel ranks without ZeRO.
    """

    path: Path
    optimizer: dict[int, str]
    model_per_rank: dict[int, str]
    model: str | None
    experts: dict[tuple[int, int], str]
    experts_optimizer: dict[int, str]

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages that the names allow: in stage 3 each rank has a model file, in 1 and 2 they share one.

        Where both kinds are there, left by an earlier run, or neither is, only the optimizer files can tell.
        """
        if self.model is not None and not self.model_per_rank:
            return 1, 2
        return (3,) if self.model_per_rank and self.model is None else (1, 2, 3)

    def has_files_of(self, num_ranks: int) -> bool:
        ranks = set(range(num_ranks))
        return set(self.optimizer) == ranks and (self.model is not None or set(self.model_per_rank) == ranks)


def is_step_folder(path: Path) -> bool:
    """Whether it holds ZeRO partition files."""
    return has_name(path, OPTIMIZER)


def find_stage(path: Path, tag: str | None, stage: int) -> Path | None:
    """The step that is meant, where the names of its files allow for ZeRO's `stage`.  No file of it is opened.

    Names do not tell stage 1 from 2: both take such a folder, and whoever reads it finds the stage in the files.
    """
    with naming_a_complete_step(path, check_names):
        folder = find_step(path, tag, _STEPS)
    return folder if folder is not None and stage in list_step_folder(folder, 0).stages else None


def zero_steps(path: Path) -> list[Path]:
    """The step folders in `path`, newest first (by the number in the name)."""
    return newest_first(filter(is_step_folder, folders_in(path)))


@contextlib.contextmanager
def naming_a_complete_step(path: Path, check: Callable[[Path], object]) -> Iterator[None]:
    """Give an error about a step folder in `path` the hint which of them can be read: the newest that passes `check`.

    `check` raises CkptError or OSError for a step that is not complete.
    """
    try:
        yield
    except CorruptError as error:
        if error.hint is None:
            whole = next((folder for folder in zero_steps(path) if _passes(check, folder)), None)
            if whole is not None:
                error.hint = f"the newest complete step here is {whole.name}: --tag {whole.name}"
            else:
                error.hint = "is this folder complete? it may still be being written, or have been copied only in part"
        raise


def _passes(check: Callable[[Path], object], folder: Path) -> bool:
    try:
        check(folder)
    except (CkptError, OSError):
        return False
    return True


def check_names(folder: Path) -> None:
    """Raise CorruptError where `folder` lacks a rank's file, as far as names and the steps beside it tell."""
    num_ranks = max(len(list_step_folder(step, 0).optimizer) for step in zero_steps(folder.parent))
    if not list_step_folder(folder, 0).has_files_of(num_ranks):
        raise IncompleteError(
            "files of ranks are missing", path=folder, expected=f"files of {counted(num_ranks, 'rank')}"
        )


_STEPS = Steps(
    is_step_folder,
    record=LATEST,
    needs_record=True,
    owns_record=True,
    may_be_others=lambda folder: (folder / "mp_rank_00_model_states.pt").exists(),  # DeepSpeed's without ZeRO
    is_finished=lambda folder: _passes(check_names, folder),
)


def tensor_parallel_ranks(path: Path) -> list[int]:
    """The tensor parallel ranks that have files in a step folder."""
    patterns = ((OPTIMIZER, 2), (_MODEL_PER_RANK, 2), (MODEL, 1))
    names = names_in(path)
    return sorted({int(m[group]) for name in names for pattern, group in patterns if (m := pattern.fullmatch(name))})


def tensor_parallel_rank(optimizer: str) -> int:
    """Return the tensor parallel rank in the name of an optimizer's file."""
    match = OPTIMIZER.fullmatch(os.path.basename(optimizer))
    return int(match[2]) if match else 0


def list_step_folder(path: Path, tp_rank: int | None = None) -> StepFolder:
    """Sort the files of a step folder by what they are; with `tp_rank` those of that tensor parallel rank alone.

    Raises CorruptError for two files of one rank, NotFoundError for model-parallel layouts and for experts' files of
    DeepSpeed before 0.5, UnsafeError for a link out of the folder.
    """
    optimizer: dict[int, str] = {}
    per_rank: dict[int, str] = {}
    experts: dict[tuple[int, int], str] = {}
    experts_optimizer: dict[int, str] = {}
    model: str | None = None
    for name in names_in(path):
        full = str(path / name)
        if match := _EXPERT.fullmatch(name):
            if match[1] is None or int(match[3]) or tp_rank:
                raise experts_unsupported(full)
            experts[int(match[1]), int(match[2])] = str(confined(path, name))
        if match := _EXPERTS_OPTIMIZER.fullmatch(name):
            if int(match[2]):
                raise experts_unsupported(full)
            experts_optimizer[int(match[1])] = str(confined(path, name))
        if PIPELINE_LAYER.fullmatch(name):
            raise NotFoundError(
                "this checkpoint holds the layers of a DeepSpeed pipeline, which is another format",
                path=full,
                hint="Megatron-DeepSpeed's and GPT-NeoX's: the format is megatron-deepspeed",
            )
        for pattern, files in ((OPTIMIZER, optimizer), (_MODEL_PER_RANK, per_rank)):
            if match := pattern.fullmatch(name):
                if not _is_of(tp_rank, int(match[2]), full):
                    continue
                put(files, int(match[1]), path, name, int(match[1]))
        if (match := MODEL.fullmatch(name)) and _is_of(tp_rank, int(match[1]), full):
            model = str(confined(path, name))
    return StepFolder(path, optimizer, per_rank, model, experts, experts_optimizer)


def put(files: dict[Any, str], key: Any, folder: Path, name: str, rank: int | None = None) -> None:
    """Note a file by what it is of; CorruptError where there is one already."""
    if key in files:
        raise CorruptError(
            "two files of one rank: one of them is left over from an earlier run",
            path=folder / name,
            rank=rank,
            found=f"also {os.path.basename(files[key])}",
            hint="remove the one that does not belong to this run",
        )
    files[key] = str(confined(folder, name))


def _is_of(tp_rank: int | None, found: int, path: str) -> bool:
    """Whether a file of the tensor parallel rank `found` is wanted; NotFoundError where there is to be only one."""
    if tp_rank is None and found != 0:
        raise tensor_parallel(path)
    return found == (tp_rank or 0)


def tensor_parallel(path: str, what: str = "") -> NotFoundError:
    """The error for files of tensor parallel ranks that do not record how they share tensors."""
    return _unsupported(
        path,
        "parts of tensors on tensor-parallel ranks (mp_rank other than 00) without a pipeline's files of layers" + what,
        "AutoTP's are read where DeepSpeed recorded how ranks share tensors (0.19.8); else have the "
        "script that trained it save whole tensors, as Accelerate's get_state_dict does under AutoTP; GPT-NeoX writes "
        "files of layers with pipe_parallel_size 1",
    )


def experts_unsupported(path: str, what: str = "") -> NotFoundError:
    """The error for experts spread over ranks in a way that is not read."""
    return _unsupported(
        path,
        "experts that DeepSpeed-MoE spread over ranks" + what,
        "load it with the script that trained it at ep_size 1 (AutoEP: autoep_size 1), where every rank has all "
        "experts, and save the module's state dict with torch.save: the format `full` is that (`ckpt convert full hf`)",
    )


def check_has_model(step: Path) -> None:
    """Raise HalfError if a step has no file with a part of the model.

    DeepSpeed writes the model's files before the optimizer's, so an interrupted save has them.  A step that lacks only
    some of them is incomplete, not half: its reader names the missing file.
    """
    if not any(name.endswith(_MODEL_SUFFIX) for name in names_in(step)):
        raise optimizer_alone(step, "the model's files, *_model_states.pt")


def is_of_experts(name: str) -> bool:
    """Whether a file holds an expert, or the optimizer of an expert parallel rank."""
    return bool(_EXPERT.fullmatch(name) or _EXPERTS_OPTIMIZER.fullmatch(name))


def is_of_one_rank(path: str) -> bool:
    """Whether a file is a data parallel rank's own model file, as stage 3 has them."""
    return bool(_MODEL_PER_RANK.fullmatch(os.path.basename(path)))


def is_model_file(name: str) -> bool:
    """Whether a file is a tensor parallel rank's model file, of those that all its data parallel ranks share."""
    return bool(MODEL.fullmatch(name))


def refuse_unsupported(folder: Path) -> None:
    """NotFoundError where a step's folder without ZeRO's files is of tensor-parallel ranks, or of DeepSpeed-MoE."""
    if not folder.is_dir() or is_universal(folder) or has_name(folder, PIPELINE_LAYER):
        return
    list_step_folder(folder)


def is_universal(folder: Path) -> bool:
    """Whether it is a universal checkpoint, which has model files beside the tensors' folders."""
    return (folder / "zero").is_dir()


def _unsupported(path: str, what: str, hint: str) -> NotFoundError:
    return NotFoundError(f"this checkpoint holds {what}, which is not supported", path=path, hint=hint)
