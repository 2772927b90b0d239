"""The files that stand beside a sharded checkpoint in its run folder, for a run of another number of ranks.

As HF Trainer (transformers/trainer.py, `_load_rng_state`, `_load_optimizer_and_scheduler`) and Accelerate
(accelerate/utils/constants.py, `checkpointing.py`) name them.  Everything is copied as bytes and nothing is loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.checkpoint import Checkpoint, TargetFile
from ckpt.companions import CONFIG, SHARED_RUN_PATTERNS, companions, dump_config, find_config, parse_json
from ckpt.dtypes import DType
from ckpt.errors import LossError
from ckpt.files import confined, translate_os_errors

#: Files of the run as a whole.  `training_args.bin` is a pickle of a program's objects: bytes to us.
_SHARED = (*SHARED_RUN_PATTERNS, "adapter_config.json", "zero_to_fp32.py", "zero_to_torch.py")
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


def run_companions(checkpoint: Checkpoint, num_ranks: int, dtype: DType | None) -> Companions:
    """Config, tokenizer and the like of the model; trainer state, scheduler and random states of the step."""
    folders = [Path(folder) for folder in checkpoint.folders]
    found = {companion.name: companion.content for companion in companions(folders)}
    config = _config(folders, dtype)
    if config is not None:
        found[CONFIG] = config
    home = _home(checkpoint)
    names = sorted(entry.name for entry in home.iterdir() if entry.is_file()) if home else []
    if home is not None:
        for name in names:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _SHARED):
                found[name] = _content(home, name)
    states = [state for state in map(_random_state, names) if state is not None]
    for state in states:
        if home is not None and state.rank < num_ranks:
            found[state.name_among(num_ranks)] = _content(home, state.name)
    return Companions(
        tuple(TargetFile.of_bytes(name, content) for name, content in sorted(found.items())),
        tuple(_dropped(names, states, num_ranks)),
        tuple(_missing(states, num_ranks)),
    )


def _home(checkpoint: Checkpoint) -> Path | None:
    """The folder that holds the step: only there do run files belong to this step."""
    home = Path(checkpoint.path).parent if Path(checkpoint.path).is_dir() else None
    return home if home is not None and str(home) in checkpoint.folders else None


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
    """A rank's random state, and the name of its file in a run of `num_ranks`."""

    name: str
    rank: int
    trainer: bool

    def name_among(self, num_ranks: int) -> str:
        if not self.trainer:
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
