"""The folder that `DeepSpeedEngine.save_checkpoint` leaves: step folders, `latest`, and one or two files per rank.

File names: deepspeed/runtime/engine.py, `_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_zero_ckpt_prefix` (0.19).  The
number after `zero_pp_rank_` is the data-parallel rank; the prefix says which precision was enabled and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.move.files import confined

# The underscore before "optim" is missing in files from before DeepSpeed 0.3.
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL_PER_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")
_PIPELINE_LAYER = re.compile(r"layer_\d+(?:-model_\d+)?-model_states\.pt")

_MAX_LATEST = 4096


@dataclass(frozen=True)
class StepFolder:
    """The files of one step folder: optimizer files and per-rank model files by data-parallel rank, numerically.

    `model` is the single model file of stages 0 to 2.
    """

    path: Path
    optimizer: dict[int, str]
    model_per_rank: dict[int, str]
    model: str | None


def is_step_folder(path: Path) -> bool:
    """Whether it holds ZeRO partition files."""
    return path.is_dir() and any(_OPTIMIZER.fullmatch(name) for name in os.listdir(path))


def find_step_folder(path: Path, tag: str | None) -> Path | None:
    """The step folder that `path` is, that `tag` names in it, or that its `latest` file records.

    None where nothing here is of this kind.  CorruptError where `latest` is missing, empty or leads nowhere although
    step folders exist: which of them is meant is then the user's to say.
    """
    if not path.is_dir():
        return None
    if tag is None and is_step_folder(path):
        return path
    if tag is not None:
        folder = confined(path, tag)
        if is_step_folder(folder):
            return folder
        if path.name == tag and is_step_folder(path):
            return path
        if steps := step_folders(path):
            raise NotFoundError(
                f"no ZeRO checkpoint with the tag {tag!r}",
                path=path,
                hint="there is " + ", ".join(folder.name for folder in steps),
            )
        return None
    latest = path / "latest"
    if not latest.is_file():
        if steps := step_folders(path):
            raise CorruptError(
                "there is no `latest` file that says which step is meant",
                path=path,
                expected="a file `latest` with the name of a step folder",
                found=", ".join(folder.name for folder in steps[:8]),
            )
        return None
    recorded = _recorded(latest)
    if not recorded:
        raise CorruptError("`latest` is empty", path=latest, expected="the name of a step folder")
    folder = confined(path, recorded)
    if is_step_folder(folder):
        return folder
    if not step_folders(path) and (folder / "mp_rank_00_model_states.pt").exists():
        return None  # a DeepSpeed checkpoint without ZeRO
    raise CorruptError(
        "`latest` names a step folder that is not there, or that holds no optimizer files",
        path=latest,
        expected=f"ZeRO files in {recorded}/",
    )


def _recorded(latest: Path) -> str:
    with open(latest, "rb") as file:
        return file.read(_MAX_LATEST).decode("utf-8", "replace").strip()


def newer_than_latest(folder: Path) -> list[str]:
    """Names of the step folders that are newer than `folder`, if `folder` is what `latest` records."""
    latest = folder.parent / "latest"
    if not latest.is_file() or _recorded(latest) != folder.name:
        return []
    names = [other.name for other in step_folders(folder.parent)]
    return names[: names.index(folder.name)]


def step_folders(path: Path) -> list[Path]:
    """The step folders in `path`, newest first (by the number in the name)."""
    folders = [entry for entry in path.iterdir() if is_step_folder(entry)]
    return sorted(folders, key=lambda f: (_number(f.name), f.name), reverse=True)


def newest_complete(path: Path, read: Callable[[Path], object]) -> Path | None:
    """The newest step folder in `path` that can be read."""
    for folder in step_folders(path):
        try:
            read(folder)
        except (CkptError, OSError):
            continue
        return folder
    return None


def _number(name: str) -> int:
    digits = re.findall(r"\d+", name)
    return int(digits[-1]) if digits else -1


def list_step_folder(path: Path) -> StepFolder:
    """Sort the files of a step folder by what they are.

    Raises CorruptError for two files of one rank, NotFoundError for model-parallel and DeepSpeed-MoE layouts.
    """
    optimizer: dict[int, str] = {}
    per_rank: dict[int, str] = {}
    model: str | None = None
    for name in sorted(os.listdir(path)):
        full = str(path / name)
        if _EXPERT.fullmatch(name):
            raise _unsupported(full, "experts that DeepSpeed-MoE spread over ranks")
        if _PIPELINE_LAYER.fullmatch(name):
            raise NotFoundError(
                "this checkpoint holds the layers of a DeepSpeed pipeline, which is another format",
                path=full,
                hint="Megatron-DeepSpeed's and GPT-NeoX's: the format is megatron-deepspeed",
            )
        for pattern, files in ((_OPTIMIZER, optimizer), (_MODEL_PER_RANK, per_rank)):
            if match := pattern.fullmatch(name):
                _refuse_model_parallel(full, int(match[2]))
                rank = int(match[1])
                if rank in files:
                    raise CorruptError(
                        "two files of one rank: one of them is left over from an earlier run",
                        path=full,
                        rank=rank,
                        found=f"also {os.path.basename(files[rank])}",
                        hint="remove the one that does not belong to this run",
                    )
                files[rank] = full
        if match := _MODEL.fullmatch(name):
            _refuse_model_parallel(full, int(match[1]))
            model = full
    return StepFolder(path, optimizer, per_rank, model)


def _refuse_model_parallel(path: str, rank: int) -> None:
    if rank != 0:
        raise _unsupported(path, "tensor- or pipeline-parallel ranks (mp_rank other than 00)")


def _unsupported(path: str, what: str) -> NotFoundError:
    return NotFoundError(f"this checkpoint holds {what}, which is not supported", path=path)
