"""Load a folder by torch_checkpointing's own loader: `python torch_checkpointing_loading.py FOLDER RANKS FORM OUT`.

Trains the fixture's model one step under FSDP2, loads FOLDER strictly into it, and saves the gathered tensors to OUT.
FORM is `named` or `flat`. Prints the step, the optimizer's lr and step, and the scheduler's epoch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def load(rank: int, port: int, folder: str, ranks: int, form: str, out: str) -> None:
    import make_torch_checkpointing as fixture
    from torch_checkpointing.state_transformations import optimizer_transform_post, optimizer_transform_pre
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    fixture.on_cpu()
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**fixture.SIZES, **fixture.HEADS))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model(torch.arange(6).view(1, 6)).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    is_flat = form == "flat"
    held = optimizer_transform_pre(optimizer.state_dict())
    if is_flat:
        held = get_state_dict(model, optimizer, options=FLAT)[1]
    into = {"model": model.state_dict(), "optimizer": held, "step": 0, "lr_scheduler": scheduler.state_dict()}
    loaded = fixture.manager().load(folder, into=into, strict=True)
    if is_flat:
        state = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(model, optimizer, **state, options=FLAT)
    else:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(optimizer_transform_post(loaded["optimizer"]))
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        found = {f"weight/{fqn}": value for fqn, value in weights.items()}
        for fqn, values in states["state"].items():
            found |= {f"{name}/{fqn}": value for name, value in values.items() if name != "step"}
        save_file(found, out)
        (steps,) = {float(values["step"]) for values in states["state"].values()}
        epoch = loaded["lr_scheduler"]["last_epoch"]
        print(json.dumps([loaded["step"], optimizer.param_groups[0]["lr"], steps, epoch]))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number = free.getsockname()[1]
    folder, ranks, form, out = sys.argv[1:]
    torch.multiprocessing.spawn(load, (number, folder, int(ranks), form, out), nprocs=int(ranks))
