"""Load with transformers' own distributed loaders: `main()` on each rank, with arguments OUT MODEL OPTIMIZER...

Loads MODEL under FSDP2 and each OPTIMIZER into a new AdamW, and saves the gathered tensors to OUT, as 0.safetensors and
so on. `said.txt` has a line for each OPTIMIZER: the param groups' lr, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.checkpoint import load_optimizer_distributed

    out, folder, *optimizers = sys.argv[1:]
    dist.init_process_group("gloo")
    sharded = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharded, dtype=torch.float32)
    lines = []
    for number, place in enumerate(optimizers):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        try:
            load_optimizer_distributed(model, optimizer, place)
        except CheckpointException as error:
            lines.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        lines.append(json.dumps([group["lr"] for group in optimizer.param_groups]))
        weights, states = get_state_dict(model, optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            found = {f"weight/{fqn}": value for fqn, value in weights.items()}
            for fqn, values in states["state"].items():
                found |= {f"{name}/{fqn}": value for name, value in values.items()}
            save_file(found, Path(out, f"{number}.safetensors"))
    if dist.get_rank() == 0:
        Path(out, "said.txt").write_text("".join(f"{line}\n" for line in lines))
    dist.destroy_process_group()
