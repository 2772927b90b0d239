"""A user's usual merge: transformers, PEFT's merge_and_unload, save_pretrained.

python -m benchmarks.lora_peer BASE ADAPTER OUTPUT
"""

from __future__ import annotations

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    base, adapter, output = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
