"""Base model in bf16 and a rank 16 LoRA adapter on all linear layers, each saved by its own library.

python -m benchmarks.lora_source FOLDER NUM_LAYERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.models import LORA_RANK, write_config


def write(folder: Path, num_layers: int) -> None:
    base = folder / "base"
    base.mkdir()
    write_config(base, num_layers)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).to(torch.bfloat16).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    wrapped = get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)
    wrapped.save_pretrained(folder / "adapter")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
