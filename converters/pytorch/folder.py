"""Folders with DCP checkpoints: DCP's own, Accelerate's pair, and run folders with steps.

    <any name>/.metadata, __0_0.distcp, ...          torch's `dcp.save`
    <any name>/shard-00001-model-00001-of-00001.safetensors, ...    torch's `HuggingFaceStorageWriter`, transformers 5
    checkpoint-N/pytorch_model_fsdp_0/, optimizer_0/ Accelerate (1.15, `utils/fsdp_utils.py`), HF Trainer, Axolotl
    <any name>/shard-..., <any name>/<any name>/.metadata     transformers 5.24, the optimizer in the model's folder
    <any name>/model.safetensors, <any name>/<any name>/.metadata    the same without `distributed_checkpoint=True`
    checkpoint-N/pytorch_model_fsdp_rankR.bin, optimizer_0/    the same with LOCAL_STATE_DICT
    checkpoint-N/pytorch_model_fsdp_1_rankR.bin, optimizer_1/  the second model in such a save
    outputs/checkpoint/step-N/                       torchtitan (`components/checkpoint.py`)

A `metadata.json` or `common.pt` beside `.metadata` belongs to Megatron's `torch_dist`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt.containers.dcp.metadata import DATA_FILE, METADATA, PER_RANK, read_metadata
from ckpt.containers.weights import INDEX, SINGLE
from ckpt.move.files import confined
from ckpt.move.listing import folders_in, names_in
from ckpt.runs.finding import Steps, find_step, number_of
from ckpt.runs.steps import MEGATRONS_COMMON, MEGATRONS_LAST, enclosing_folders
from converters.pytorch.keys import OPTIMIZER_NAMES

MODEL_0, OPTIMIZER_0 = "pytorch_model_fsdp_0", "optimizer_0"
#: LOCAL_STATE_DICT's model files, with the model's number, if several, and the rank.
LOCAL = re.compile(r"pytorch_model_fsdp(?:_([1-9]\d*))?_rank(\d+)\.bin")
SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")

_MODEL = re.compile(r"pytorch_model_fsdp_(\d+)")
_ACCELERATE = re.compile(r"(?:pytorch_model_fsdp|optimizer)_(\d+)")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of one checkpoint. `shards` are DCP's, `local` are LOCAL_STATE_DICT's.

    `is_hub` means that `save_pretrained` wrote the model.
    """

    folders: tuple[Path, ...]
    shards: tuple[str, ...] = ()
    local: tuple[tuple[int, str], ...] = ()
    is_hub: bool = False


def is_dcp(folder: Path) -> bool:
    """Return True if DCP itself wrote this folder, complete or not."""
    return folder.is_dir() and _is_dcp(names_in(folder))


def _is_dcp(names: list[str]) -> bool:
    if any(name in (MEGATRONS_LAST, MEGATRONS_COMMON) for name in names):
        return False
    return METADATA in names or any(
        DATA_FILE.fullmatch(n) or PER_RANK.fullmatch(n) or SHARD.fullmatch(n) for n in names
    )


def find_folder(path: Path, tag: str | None) -> Path | None:
    """Return the checkpoint at `path`, or its step or model `tag`."""
    if path.name == METADATA and path.is_file():
        path = path.parent
    if path.is_file():
        return path if is_local(path.parent) and number_of(path) is not None else None
    found = find_step(path, tag, _STEPS)
    return path if found is None and tag is not None and _holds_model(path, tag) else found


def _holds_model(folder: Path, key: str) -> bool:
    if not is_dcp(folder) or not (folder / METADATA).is_file() or key in OPTIMIZER_NAMES:
        return False
    at = tuple(key.split("."))
    return any(steps[: len(at)] == at and len(steps) > len(at) for _, _, steps in read_metadata(folder).paths())


def is_checkpoint(folder: Path) -> bool:
    is_pair = is_dcp(folder / MODEL_0) or is_dcp(folder / OPTIMIZER_0)
    return is_dcp(folder) or is_pair or bool(_local(folder)) or _optimizer_by_hub_model(folder) is not None


def is_local(folder: Path) -> bool:
    """Return True for LOCAL_STATE_DICT files."""
    return bool(_local(folder))


def _local(folder: Path, number: int = 0) -> tuple[tuple[int, str], ...]:
    """Return ranks and names, unless a DCP folder holds the model."""
    if not folder.is_dir() or is_dcp(folder / MODEL_0):
        return ()
    found = ((match, name) for name in names_in(folder) if (match := LOCAL.fullmatch(name)))
    return tuple(sorted((int(match[2]), name) for match, name in found if int(match[1] or 0) == number))


_STEPS = Steps(is_checkpoint)


def parts(path: Path) -> Parts:
    if path.is_file():
        number = number_of(path) or 0
        optimizer = confined(path.parent, f"optimizer_{number}")
        return Parts((optimizer,) if is_dcp(optimizer) else (), local=_local(path.parent, number))
    names = names_in(path)
    if _is_dcp(names):
        shards = tuple(name for name in names if SHARD.fullmatch(name))
        own = (path,) if not shards or METADATA in names else ()
        return Parts((*own, *_optimizer_of(path)), shards)
    if (by_hub_model := _optimizer_by_hub_model(path)) is not None:
        return Parts((by_hub_model,), is_hub=True)
    pair = [confined(path, name) for name in (MODEL_0, OPTIMIZER_0) if is_dcp(path / name)]
    return Parts(tuple(pair), local=_local(path))


def _optimizer_of(path: Path) -> list[Path]:
    """Return the model's optimizer folder.

    Accelerate numbers both. `model` pairs with `optim`. transformers' optimizer has any name inside the model's folder.
    """
    inside = folders_in(path) if any(map(SHARD.fullmatch, names_in(path))) else []
    beside = [path.parent / name for name in ("optim", "optimizer")] if path.name == "model" else []
    if match := _MODEL.fullmatch(path.name):
        beside = [path.parent / f"optimizer_{match[1]}"]
    found = [one for one in (*inside, *beside) if is_dcp(one) and _holds_optimizer_alone(one)]
    return found if len(found) == 1 else []


def _optimizer_by_hub_model(path: Path) -> Path | None:
    if not any((path / name).is_file() for name in (SINGLE, INDEX)) or is_dcp(path / OPTIMIZER_0):
        return None
    found = [one for one in folders_in(path) if (one / METADATA).is_file() and is_dcp(one)]
    return found[0] if len(found) == 1 and _holds_optimizer_alone(found[0]) else None


def _holds_optimizer_alone(folder: Path) -> bool:
    if not (folder / METADATA).is_file():  # reading it raises the error
        return _MODEL.fullmatch(folder.name) is None
    return all(step[0] in OPTIMIZER_NAMES for _, _, step in read_metadata(folder).paths())


def run_folders(path: Path) -> tuple[str, ...]:
    """Return folders that may hold the run's other files."""
    if _ACCELERATE.fullmatch(path.name):
        return str(path), str(path.parent)
    return tuple(map(str, enclosing_folders(path.parent if path.is_file() else path)))
