"""The bundled trainer: tiny models, real engines, and the truth about what a checkpoint holds.

    torchrun --nproc-per-node 4 -m train --strategy zero3 --model llama --steps 4 --output outputs

trains a tiny model with the real framework, saves through that framework's own call and, with `--truth`, gathers
every tensor of the live engine through the engine's own API into a safetensors file beside the checkpoint. A
converter is right when it reproduces that file bit for bit, so nothing here imports any converter code.

`run(Config(...))` does the same from Python and may be called many times inside one process group.
"""

from typing import Any

from train.config import Config, UserError

__all__ = ["Config", "UserError", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(name)
    from train.loop import run  # brings torch, without which nodes are looked over (train.preflight)

    return run
