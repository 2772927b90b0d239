"""The bundled trainer: tiny models, real engines, and the truth about what a checkpoint holds.

    python -m train --ranks 4 --strategy zero3 --model llama --steps 4 --output outputs

trains a tiny model with the real framework, saves through that framework's own call and, with `--truth`, gathers
every tensor of the live engine through the engine's own API into a safetensors file beside the checkpoint. A
converter is right when it reproduces that file bit for bit, so nothing here imports any converter code.

engines/ and megatron/ drive the frameworks, each as an Engine (engine.py), truth/ writes down what they hold, and
operations/ what is known of a run and its checkpoints. simple.py stands apart: the trainer that users read and copy,
which goes on by `ckpt.resume`.

`run(Config(...))` trains from Python and may be called many times inside one process group.
"""

from typing import Any

from train.config import Config, UserError

__all__ = ["Config", "UserError", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(name)
    from train.loop import run  # brings torch, without which nodes are looked over (`ckpt preflight`)

    return run
