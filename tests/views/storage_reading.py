"""`dcp.load` fills FSDP2 by `ckpt.StorageReader`: `torchrun ... -m tests.views.storage_reading jobs.jsonl`.

A line has `path`, `output`, `config`, `dtype`, `freeze`, and `form` (`nested`, `flat`, `named`, `bare`); `missing` asks
for an absent name, `other` is the last rank's path.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.support.places import FIXTURES
from train import launch, truth
from train.config import Config
from train.engines import native
from train.optimizers import param_groups


def build(job: dict[str, Any]) -> nn.Module:
    """Build a model with values other than the checkpoint's."""
    torch.manual_seed(99)
    if "config" in job:
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = getattr(torch, job.get("dtype", "float32"))
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["config"]), dtype=dtype)
    else:
        spec = importlib.util.spec_from_file_location("make_dcp", FIXTURES / "make_dcp.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.Tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not re.search(job.get("freeze") or "$^", name))
    return model


def load(job: dict[str, Any]) -> None:
    model = build(job)
    names, ties = [name for name, _ in model.named_parameters()], truth.ties(model)
    buffers = list(truth.persistent_buffers(model))
    for layer in getattr(getattr(model, "model", None), "layers", ()):
        fully_shard(layer)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = param_groups(model, Config(strategy="fsdp2")) if "config" in job else trained
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=job["form"] == "flat")
    weights, states = get_state_dict(model, optimizer, options=options)
    outer = {"model": "app.net", "optimizer": "app.opt"} if job["form"] == "named" else {}
    if job["form"] == "bare":
        state: dict[str, Any] = dict(weights)
    elif job["form"] == "named":
        state = {"app": {"net": weights, "opt": states}}
    else:
        state = {"model": weights, "optimizer": states}
    if job.get("missing"):
        state["model"] = {"lm_head.bias": torch.zeros(3), **weights}
    is_last = dist.get_rank() == dist.get_world_size() - 1
    reader = ckpt.StorageReader(job.get("other", job["path"]) if is_last else job["path"], **outer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            dcp.load(state, storage_reader=reader)
        except dcp.CheckpointException as error:
            told: Any = str(error)
        else:
            told = None
    held = sum(t.nbytes for t in map(local, leaves(state)) if t is not None)
    facts = {"read": reader.bytes_read, "held": held, "told": told}
    facts["said"] = [str(one.message) for one in said if str(one.message).startswith(str(job["path"]))]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, facts)
    if not told:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    tensors, step = native.gather(model, optimizer, names, buffers)
    if dist.get_rank() == 0:
        described = [
            {k: v for k, v in group.items() if k != "params"} | {"num_params": len(group["params"])}
            for group in optimizer.param_groups
        ]
        config = Config(strategy="fsdp2")
        truth.write(Path(job["output"]), "truth", config, 0, tensors, {"ties": ties, "adam_step": step})
        Path(job["output"], "read.json").write_text(json.dumps({"ranks": every, "groups": described}))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


def local(value: Any) -> torch.Tensor | None:
    """Return this rank's part, or None for values other than tensors."""
    if not isinstance(value, torch.Tensor):
        return None
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def main() -> None:
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        try:
            load(json.loads(line))
        except Exception as error:
            error.add_note(f"while loading {line}")
            raise
        dist.barrier()
    launch.stop()


if __name__ == "__main__":
    main()
