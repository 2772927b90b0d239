"""Merging by PEFT itself, one layer at a time: kinds of LoRA whose merge is not W + BA of the base as it is.

Block-diagonal LoRA, KaSA, VeLoRA and MonteCLoRA (peft 0.21.2, `tuners/lora/variants.py`), and inits that are made of
the base weight and taken out of it when an adapter is loaded (PiSSA, OLoRA) or rounded otherwise (MiCA).  Each layer is
put into a model that has nothing else, under its own name, as patterns of ranks and blocks go by it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.run_folder.adapter_config import OF_PEFT, AdapterConfig

if TYPE_CHECKING:
    import torch

#: Of the config, what is about other layers than the one at hand.
_ELSEWHERE = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "ensure_weight_tying"),
)
_LOCK = threading.Lock()  # PEFT draws numbers, and changes torch's own settings meanwhile


def merge_layer(
    config: AdapterConfig, module: str, weight: torch.Tensor, state: Mapping[str, torch.Tensor], *, transposed: bool
) -> torch.Tensor:
    """`weight` of the linear layer `module`, with its adapter's `state`, by PEFT's names, merged into it.

    `weight` is [out, in], or [in, out] where `transposed`.  CorruptError where PEFT does not load the adapter,
    UsageError where its version does not know the kind.
    """
    import torch
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    settings = {key: value for key, value in config.raw.items() if key not in _ELSEWHERE}
    settings |= {"target_modules": [module], "bias": "none", "task_type": None, "lora_dropout": 0.0}
    with _LOCK, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            made: Any = LoraConfig.from_peft_type(**settings)
            if lacking := [key for key in OF_PEFT if config.raw.get(key) and not getattr(made, key, None)]:
                raise UsageError(
                    "the installed PEFT does not know this kind of adapter", path=config.path, found=", ".join(lacking)
                )
            wrapped = get_peft_model(_alone(module, weight.T if transposed else weight), made)
            loaded = set_peft_model_state_dict(wrapped, dict(state))
        except (ValueError, RuntimeError, TypeError) as error:
            raise CorruptError(f"PEFT does not load this adapter: {error}", path=config.path, fqn=module) from error
        if loaded.unexpected_keys:
            raise CorruptError(
                "PEFT has no place for a tensor of this adapter", path=config.path, fqn=loaded.unexpected_keys[0]
            )
        merged: torch.Tensor = wrapped.merge_and_unload().get_submodule(module).weight.detach()
        return merged.T if transposed else merged


def _alone(module: str, weight: torch.Tensor) -> torch.nn.Module:
    """A model that has this layer and nothing else."""
    from torch import nn

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    root = inner = nn.Module()
    *path, leaf = module.split(".")
    for name in path:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(leaf, layer)
    return root
