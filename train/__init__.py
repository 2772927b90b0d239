"""Bundled trainer: tiny models on real engines, with a reference file for every checkpoint.

    python -m train --ranks 4 --strategy zero3 --model llama --steps 4 --output outputs

trains a tiny model and saves it through the framework's own call. With `--truth` it also gathers every tensor through
the engine's API into a safetensors file. A correct converter reproduces this file bit for bit, so nothing here imports
converter code.

`run(Config(...))` trains from Python. It may be called many times in one process group.
"""

from typing import Any

from train.config import Config, UserError

__all__ = ["Config", "UserError", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(name)
    from train.loop import run  # imports torch, and `ckpt preflight` does without it

    return run
