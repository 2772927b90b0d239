"""Adapters that PEFT saves, and the weights of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def load_base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}  # as the trainer builds its models
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **eager)


def save_adapter(base: Path, folder: Path, options: dict[str, Any], seed: int = 1) -> Path:
    """An adapter on the base with random values everywhere, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_base(base), LoraConfig(r=3, lora_alpha=7, **options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
