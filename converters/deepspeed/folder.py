"""Folder written by `DeepSpeedEngine.save_checkpoint`.

File names: deepspeed/runtime/engine.py, `_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_zero_ckpt_prefix` (0.19). The
number after `zero_pp_rank_` is the data-parallel rank. The prefix only shows the enabled precision.
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
from ckpt.base.text import pluralize
from ckpt.move.files import confined
from ckpt.move.listing import has_name, names_in
from ckpt.runs.finding import Steps, find_step, newest_first, newest_whole
from ckpt.runs.half_checkpoints import optimizer_alone
from ckpt.runs.steps import LATEST, searched_folders

ALIASES = ("deepspeed", "ds")
# Before DeepSpeed 0.3 there was no underscore before "optim".
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL_PER_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
#: Suffix of all model files: whole, per rank, expert or pipeline layer.
_MODEL_SUFFIX = "model_states.pt"
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
PIPELINE_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_PART = "is this folder complete? a run may still be writing it, or only part of it was copied"


@dataclass(frozen=True)
class StepFolder:
    """Files in one step folder, by data-parallel rank.

    `model` is the single model file in stages 0 to 2. `experts` are keyed by layer and expert number.
    `experts_optimizer` are expert-parallel ranks' optimizer files without ZeRO.
    """

    path: Path
    optimizer: dict[int, str]
    model_per_rank: dict[int, str]
    model: str | None
    experts: dict[tuple[int, int], str]
    experts_optimizer: dict[int, str]

    @property
    def stages(self) -> tuple[int, ...]:
        """ZeRO stages that fit the file names: stage 3 has a model file per rank, stages 1 and 2 have one.

        An earlier run may have left the other kind.
        """
        if self.model is not None and not self.model_per_rank:
            return 1, 2
        return (3,) if self.model_per_rank and self.model is None else (1, 2, 3)

    def has_all_files(self, num_ranks: int) -> bool:
        ranks = set(range(num_ranks))
        return set(self.optimizer) == ranks and (self.model is not None or set(self.model_per_rank) == ranks)


def is_step_folder(path: Path) -> bool:
    return has_name(path, OPTIMIZER)


def find_stage(path: Path, tag: str | None, stage: int) -> Path | None:
    """Find a step with ZeRO's `stage`. Names don't distinguish stages 1 and 2."""
    with naming_a_complete_step(path, check_names):
        folder = find_step(path, tag, _STEPS)
    return folder if folder is not None and stage in list_step_folder(folder, 0).stages else None


def zero_steps(path: Path) -> list[Path]:
    return newest_first(filter(is_step_folder, searched_folders(path)))


@contextlib.contextmanager
def naming_a_complete_step(path: Path, check: Callable[[Path], object]) -> Iterator[None]:
    """Add a hint with the newest step that passes `check`."""
    try:
        yield
    except CorruptError as error:
        if error.hint is None:
            error.hint = newest_whole(zero_steps(path), lambda folder: _passes(check, folder)) or _PART
        raise


def _passes(check: Callable[[Path], object], folder: Path) -> bool:
    try:
        check(folder)
    except (CkptError, OSError):
        return False
    return True


def check_names(folder: Path) -> None:
    """Raise IncompleteError if `folder` lacks a rank's file, judging by the steps beside it."""
    num_ranks = max(len(list_step_folder(step, 0).optimizer) for step in zero_steps(folder.parent))
    if not list_step_folder(folder, 0).has_all_files(num_ranks):
        raise IncompleteError(
            "rank files are missing", path=folder, expected=f"files of {pluralize(num_ranks, 'rank')}"
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
    patterns = ((OPTIMIZER, 2), (_MODEL_PER_RANK, 2), (MODEL, 1))
    names = names_in(path)
    return sorted({int(m[group]) for name in names for pattern, group in patterns if (m := pattern.fullmatch(name))})


def tensor_parallel_rank(optimizer: str) -> int:
    match = OPTIMIZER.fullmatch(os.path.basename(optimizer))
    return int(match[2]) if match else 0


def list_step_folder(path: Path, tp_rank: int | None = None) -> StepFolder:
    """Sort the files by kind. `tp_rank` selects a tensor-parallel rank's files.

    Raise NotFoundError for model-parallel layouts and for expert files from before DeepSpeed 0.5.
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
                "this is a DeepSpeed pipeline checkpoint, another format",
                path=full,
                hint="use the format megatron-deepspeed (Megatron-DeepSpeed, GPT-NeoX)",
            )
        for pattern, files in ((OPTIMIZER, optimizer), (_MODEL_PER_RANK, per_rank)):
            if match := pattern.fullmatch(name):
                if not _is_requested_rank(tp_rank, int(match[2]), full):
                    continue
                put(files, int(match[1]), path, name, int(match[1]))
        if (match := MODEL.fullmatch(name)) and _is_requested_rank(tp_rank, int(match[1]), full):
            model = str(confined(path, name))
    return StepFolder(path, optimizer, per_rank, model, experts, experts_optimizer)


def put(files: dict[Any, str], key: Any, folder: Path, name: str, rank: int | None = None) -> None:
    if key in files:
        raise CorruptError(
            "one rank has two files: one is left over from an earlier run",
            path=folder / name,
            rank=rank,
            found=f"also {os.path.basename(files[key])}",
            hint="remove the file from the other run",
        )
    files[key] = str(confined(folder, name))


def _is_requested_rank(tp_rank: int | None, found: int, path: str) -> bool:
    """Raise NotFoundError for any rank but 0 without a `tp_rank`."""
    if tp_rank is None and found != 0:
        raise tensor_parallel(path)
    return found == (tp_rank or 0)


def tensor_parallel(path: str, what: str = "") -> NotFoundError:
    return _unsupported(
        path,
        "tensor parallel parts (mp_rank other than 00) without pipeline layer files" + what,
        "AutoTP needs DeepSpeed's sharding record (0.19.8); without it, have the script that trained it save whole "
        "tensors (Accelerate: get_state_dict); GPT-NeoX writes layer files with pipe_parallel_size 1",
    )


def experts_unsupported(path: str, what: str = "") -> NotFoundError:
    return _unsupported(
        path,
        "experts spread over ranks by DeepSpeed-MoE" + what,
        "load it with the script that trained it at ep_size 1 (AutoEP: autoep_size 1), so that every rank has all "
        "experts; save the module's state dict with torch.save, then use `ckpt convert full hf`",
    )


def check_has_model(step: Path) -> None:
    """Raise HalfError for a step without model files.

    DeepSpeed writes the model's files first, so an interrupted save has them.
    """
    if not any(name.endswith(_MODEL_SUFFIX) for name in names_in(step)):
        raise optimizer_alone(step, "the model's files, *_model_states.pt")


def is_of_experts(name: str) -> bool:
    return bool(_EXPERT.fullmatch(name) or _EXPERTS_OPTIMIZER.fullmatch(name))


def is_data_parallel_file(path: str) -> bool:
    """Return True for a data-parallel rank's model file (stage 3)."""
    return bool(_MODEL_PER_RANK.fullmatch(os.path.basename(path)))


def is_model_file(name: str) -> bool:
    """Return True for a model file shared by data-parallel ranks."""
    return bool(MODEL.fullmatch(name))


def refuse_unsupported(folder: Path) -> None:
    if not folder.is_dir() or is_universal(folder) or has_name(folder, PIPELINE_LAYER):
        return
    found = list_step_folder(folder)
    if found.model_per_rank and not found.optimizer:
        raise IncompleteError(
            "the optimizer's files are missing: ZeRO-3 keeps the weights in them, too",
            path=folder,
            expected=f"*_optim_states.pt of {pluralize(len(found.model_per_rank), 'rank')}",
            found="*_model_states.pt alone",
            hint=_PART,
        )


def is_universal(folder: Path) -> bool:
    return (folder / "zero").is_dir()


def _unsupported(path: str, what: str, hint: str) -> NotFoundError:
    return NotFoundError(f"unsupported: {what}", path=path, hint=hint)
