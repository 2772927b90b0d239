"""A user's usual merge: transformers, PEFT's merge_and_unload, save_pretrained.

python -m benchmarks.lora_peer BASE ADAPTER OUTPUT
"""

from __future__ import annotations

import os
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def merge(base: str | os.PathLike[str], adapter: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)


if __name__ == "__main__":
    merge(*sys.argv[1:])
