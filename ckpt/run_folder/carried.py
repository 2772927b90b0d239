"""The files that stand beside a checkpoint in its run folder, for a run of another number of ranks or another engine.

As HF Trainer (transformers/trainer.py, `_load_rng_state`, `_load_optimizer_and_scheduler`) and Accelerate
(accelerate/utils/constants.py, `checkpointing.py`) name them.  Everything is copied as bytes and nothing is loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import LossError
from ckpt.move.files import confined, translate_os_errors
from ckpt.plan.checkpoint import Checkpoint, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.run_folder.companions import CONFIG, SHARED_RUN_PATTERNS, companions, dump_config, find_config, parse_json
from ckpt.run_folder.left_out import run_files_left_out
from ckpt.run_folder.steps import TRAINER_STATE

#: Files that only a step of HF Trainer or of Accelerate has.
_OF_A_STEP = (TRAINER_STATE, "random_states_0.pkl")
#: Formats of which a checkpoint is the folder of a tag, and what belongs to it lies around that.
_TAGGED = ("zero1", "zero2", "zero3", "universal")
#: What DeepSpeed puts beside its files, of no use with others.
DEEPSPEED_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
#: Files of the run as a whole.  `training_args.bin` is a pickle of a program's objects: bytes to us.
_SHARED = (*SHARED_RUN_PATTERNS, "adapter_config.json", *DEEPSPEED_SCRIPTS)
#: Random states, by rank.  HF Trainer's has no number in a run of one process.
_TRAINER_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ACCELERATE_RNG = re.compile(r"random_states_(\d+)\.pkl")
#: Weights in another format, which are in the checkpoint itself as well.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "adapter_model.*")
_MAX_FILE = 64 << 20


@dataclass(frozen=True, slots=True)
class Companions:
    """Files to be written, what is left behind, and what the user should know."""

    files: tuple[TargetFile, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def run_companions(
    checkpoint: Checkpoint, num_ranks: int | None, dtype: DType | None, *, leave: tuple[str, ...] = ()
) -> Companions:
    """Config, tokenizer and the like of the model; trainer state, scheduler and random states of the step.

    `num_ranks` None keeps the random states of all ranks; files named in `leave` are not wanted.
    """
    folders = [Path(folder) for folder in checkpoint.folders]
    found = {companion.name: companion.content for companion in companions(folders)}
    config = _config(folders, dtype)
    if config is not None:
        found[CONFIG] = config
    home = _home(checkpoint)
    if home is None:
        return Companions(_files(found), tuple(run_files_left_out(checkpoint)), ())
    names = sorted(entry.name for entry in home.iterdir() if entry.is_file())
    for name in names:
        if name not in leave and any(fnmatch.fnmatchcase(name, pattern) for pattern in _SHARED):
            found[name] = _content(home, name)
    states = [state for state in map(_random_state, names) if state is not None]
    for state in states:
        if num_ranks is None or state.rank < num_ranks:
            found[state.name_among(num_ranks)] = _content(home, state.name)
    sources = {file.path for file in checkpoint.files}
    others = [name for name in names if str(home / name) not in sources]
    ranks = max((state.rank for state in states), default=0) + 1 if num_ranks is None else num_ranks
    return Companions(_files(found), tuple(_dropped(others, states, ranks)), tuple(_missing(states, ranks)))


def _files(content: dict[str, bytes]) -> tuple[TargetFile, ...]:
    return tuple(TargetFile.of_bytes(name, content[name]) for name in sorted(content))


def trainer_folder(checkpoint: Checkpoint) -> Path | None:
    """The step of HF Trainer or Accelerate that the checkpoint of a training run is, or lies in.

    None for one without an optimizer: a trainer would go on from its step as if the optimizer's states were there.
    """
    if not checkpoint.optimizer_states and not checkpoint.state.param_groups:
        return None
    path = Path(checkpoint.path)
    for folder in (path, path.parent) if path.is_dir() else (path.parent,):
        if folder == path or str(folder) in checkpoint.folders:
            with translate_os_errors(folder):
                if any((folder / name).is_file() for name in _OF_A_STEP):
                    return folder
    return None


def no_schedule(files: tuple[TargetFile, ...]) -> tuple[str, ...]:
    """What to tell of a step for HF Trainer under FSDP that lacks its scheduler (5.23, the method named above)."""
    names = {file.name for file in files}
    if TRAINER_STATE not in names or "scheduler.pt" in names:
        return ()
    return ("the source has no scheduler.pt, and without it HF Trainer loads no optimizer state either",)


def _home(checkpoint: Checkpoint) -> Path | None:
    """The folder that holds the files of the step; of DeepSpeed's, it is the one around the tag's."""
    step = trainer_folder(checkpoint)
    parent = Path(checkpoint.path).parent
    if step is None and checkpoint.format in _TAGGED and str(parent) in checkpoint.folders:
        return parent
    return step


def _config(folders: list[Path], dtype: DType | None) -> bytes | None:
    """The model's config as it is, or with the dtype that was asked for."""
    path = find_config(folders)
    if path is None:
        return None
    content = _content(path.parent, path.name)
    if dtype is None:
        return content
    config = parse_json(content, path)
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config, dict) and key in config]
    return dump_config(config | dict.fromkeys(keys, dtype.name)) if keys else content


@dataclass(frozen=True, slots=True)
class _RandomState:
    """A rank's random state, and the name of its file in a run of `num_ranks` (None: of as many as there were)."""

    name: str
    rank: int
    trainer: bool

    def name_among(self, num_ranks: int | None) -> str:
        if not self.trainer or num_ranks is None:
            return self.name
        return "rng_state.pth" if num_ranks == 1 else f"rng_state_{self.rank}.pth"


def _random_state(name: str) -> _RandomState | None:
    if match := _TRAINER_RNG.fullmatch(name):
        return _RandomState(name, int(match[1] or 0), True)
    if match := _ACCELERATE_RNG.fullmatch(name):
        return _RandomState(name, int(match[1]), False)
    return None


def _dropped(names: list[str], states: list[_RandomState], num_ranks: int) -> Iterator[str]:
    gone = sorted(state.rank for state in states if state.rank >= num_ranks)
    if gone:
        yield f"random states of {_span(gone)}: a run of {num_ranks} has no such ranks"
    weights = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHTS)]
    if weights:
        yield f"{', '.join(weights[:4])}{', ...' if len(weights) > 4 else ''}: a second copy of the weights"


def _missing(states: list[_RandomState], num_ranks: int) -> Iterator[str]:
    there = {state.rank for state in states}
    missing = [rank for rank in range(num_ranks) if rank not in there]
    if states and missing:
        yield f"no random states for {_span(missing)}: there a run starts with fresh ones"


def _span(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if whole else "ranks " + ", ".join(map(str, ranks))


def _content(folder: Path, name: str) -> bytes:
    path = confined(folder, name)
    with translate_os_errors(path):
        if path.stat().st_size > _MAX_FILE:
            raise LossError("a file of the run is too large to be carried along", path=path, expected="<= 64 MiB")
        return path.read_bytes()
