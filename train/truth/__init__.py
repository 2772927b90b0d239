"""The truth: tensors and facts of a live engine, written to a file for comparison.

`<output>/truth/<tag>.safetensors` holds, under fully qualified names spelled like in the model's state_dict(),

    weight/<fqn>      every parameter in the model's dtype, including frozen ones, each tied parameter once
    master/<fqn>      the fp32 copy of every trainable, non-empty parameter, if the engine keeps one (ZeRO).
                      DDP and FSDP step the weights themselves, in fp32 unless --precision pure: no masters
    <state>/<fqn>     every optimizer state shaped like its parameter: exp_avg, momentum_buffer, ...
    buffer/<fqn>      every persistent buffer of rank 0

and JSON texts in its metadata: ties (alias -> owner), frozen (names), param_groups (names and hyperparameters),
adam_step, step, world_size, dtype, strategy, precision (not ZeRO). dtype is the compute dtype: with bf16 and precision
mixed, FSDP's weights are fp32. `<tag>-logits.safetensors` holds input_ids and the live model's logits for them in eval
mode, in the model's dtype.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from train import data, launch
from train.config import Config
from train.engine import Engine


def ties(model: nn.Module) -> dict[str, str]:
    """Map each alias to its owner, the first name."""
    owner = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: owner[parameter] for name, parameter in named if owner[parameter] != name}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in the state dict."""
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def describe_groups(groups: list[dict[str, Any]], names: list[list[str]]) -> list[dict[str, Any]]:
    return [
        {"names": group_names} | {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group, group_names in zip(groups, names, strict=True)
    ]


def facts_of(model: nn.Module) -> dict[str, Any]:
    return {"ties": ties(model), "frozen": [name for name, one in model.named_parameters() if not one.requires_grad]}


def merged_groups(mine: list[dict[str, Any]], key: Callable[[int, dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Merge all ranks' described groups: each rank only knows its own parameters' groups."""
    merged: dict[Any, dict[str, Any]] = {}
    for number, group in (numbered for groups in launch.gather_objects(mine) for numbered in enumerate(groups)):
        known = merged.setdefault(key(number, group), group)
        known["names"] = list(dict.fromkeys([*known["names"], *group["names"]]))
    return list(merged.values())


def record(engine: Engine, config: Config, tag: str) -> None:
    """Write truth and logits files, on all ranks."""
    tensors, facts = engine.gather()
    # Far beyond any training step.
    input_ids = data.batch(10**9, 2, config.length, seed=0).to(launch.device())
    logits = engine.logits(input_ids)
    if dist.get_rank() == 0:
        folder = Path(config.output, "truth")
        write(folder, tag, config, engine.step, tensors, facts)
        both = {"input_ids": input_ids.cpu().contiguous(), "logits": logits.detach().cpu().contiguous()}
        save_file(both, folder / f"{tag}-logits.safetensors")


def write(
    folder: Path, tag: str, config: Config, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]
) -> None:
    """Write `<folder>/<tag>.safetensors`. Raise RuntimeError if a weight is not its master, rounded."""
    for name, master in tensors.items():
        role, _, fqn = name.partition("/")
        if role == "master" and not torch.equal(tensors[f"weight/{fqn}"], master.to(tensors[f"weight/{fqn}"].dtype)):
            raise RuntimeError(f"{tag}: {fqn}'s live weight is not its rounded gathered master")
    run = {"step": step, "world_size": dist.get_world_size(), "dtype": config.dtype, "strategy": config.strategy}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / f"{tag}.safetensors",
        metadata={name: json.dumps(fact) for name, fact in (run | facts).items()},
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
