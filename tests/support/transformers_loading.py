"""Load with transformers' own distributed loaders: `python transformers_loading.py RANKS OUT MODEL OPTIMIZER...`.

Loads MODEL under FSDP2 and each OPTIMIZER into a new AdamW, and saves the gathered tensors to OUT, as 0.safetensors and
so on. Prints a line for each OPTIMIZER: the param groups' lr, or the error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def load(rank: int, port: int, ranks: int, out: str, folder: str, optimizers: list[str]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.checkpoint import load_optimizer_distributed

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    sharded = DistributedConfig(fsdp_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharded, dtype=torch.float32)
    for number, place in enumerate(optimizers):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        try:
            load_optimizer_distributed(model, optimizer, place)
        except CheckpointException as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            said = json.dumps([group["lr"] for group in optimizer.param_groups])
            weights, states = get_state_dict(model, optimizer, options=WHOLE)
            if rank == 0:
                found = {f"weight/{fqn}": value for fqn, value in weights.items()}
                for fqn, values in states["state"].items():
                    found |= {f"{name}/{fqn}": value for name, value in values.items()}
                save_file(found, Path(out, f"{number}.safetensors"))
        if rank == 0:
            print(said, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number = free.getsockname()[1]
    count, *rest = sys.argv[1:]
    torch.multiprocessing.spawn(load, (number, int(count), *rest[:2], rest[2:]), nprocs=int(count))
