"""The bundled trainer: tiny models, real engines, and the truth about what a checkpoint holds.

    torchrun --nproc-per-node 4 -m train --strategy zero3 --model llama --steps 4 --output outputs

trains a tiny model with the real framework, saves through that framework's own call and, with `--truth`, gathers
every tensor of the live engine through the engine's own API into a safetensors file beside the checkpoint. A
converter is right when it reproduces that file bit for bit, so nothing here imports any converter code.

`run(Config(...))` does the same from Python and may be called many times inside one process group.
"""

from train.config import Config, UserError
from train.loop import run

__all__ = ["Config", "UserError", "run"]
