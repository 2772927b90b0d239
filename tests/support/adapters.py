"""Bases and adapters saved by transformers and PEFT, merged by PEFT and by `ckpt`, and a folder's weights."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ckpt.commands.merge_lora import find as adapters
from ckpt.commands.merge_lora import merge as lora
from tests.support.model_files import merge_json
from train.config import Config
from train.models import build_model

#: Title for the table printed after the tests.
TABLE = "merged LoRA tensors that equal peft's merge_and_unload, bit for bit"
Tables = dict[str, dict[str, dict[str, str]]]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Names:
    """Layer names in an architecture."""

    linear: list[str]
    embedding: str
    head: str = "lm_head"


LLAMA = Names(["q_proj", "o_proj", "up_proj", "down_proj"], "embed_tokens")
ATTENTION = Names(["q_proj", "o_proj"], "embed_tokens")
MODELS = {
    "llama": LLAMA,
    "gpt2": Names(["c_attn", "c_proj", "c_fc"], "wte"),
    "qwen2": LLAMA,
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
}
MOE = ("qwen3_moe", "gpt_oss")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load_base(folder: Path) -> Any:
    """Return a model of the caller's own. Copying takes less time than loading."""
    states = (path.stat() for path in sorted(folder.iterdir()))
    return copy.deepcopy(_loaded(folder, tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in states)))


@functools.lru_cache(8)
def _loaded(folder: Path, states: tuple[tuple[int, int, int], ...]) -> Any:
    from transformers import AutoModelForCausalLM

    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}  # like the trainer's models
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **eager)


def perturb(model: torch.nn.Module, seed: int | None = None) -> None:
    """Change all that is trained, by random values from the seed or from torch's own generator."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def save_adapter(base: Path, folder: Path, options: dict[str, Any], seed: int = 1) -> Path:
    """Save an adapter on the base as PEFT does, with random values everywhere."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_base(base), LoraConfig(r=3, lora_alpha=7, **options))
    perturb(model, seed)
    model.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of tensors that only one side has, or whose bits differ."""
    return sorted(name for name in a.keys() | b.keys() if not (name in a and name in b and same(a[name], b[name])))


def equal(one: Path, other: Path) -> bool:
    """Return True if two folders hold the same tensors, bit for bit."""
    return not differing(weights(one), weights(other))


def save_base(model: str, dtype: torch.dtype, folder: Path) -> Path:
    """Save a tiny model with transformers."""
    built: Any = build_model(Config(model=model)).to(dtype)
    built.config.dtype = dtype
    built.save_pretrained(folder)
    return folder


def merge_by_peft(base: Path, saved: list[Path], folder: Path) -> None:
    """Merge the adapters with PEFT, one after the other."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), saved[0], adapter_name="0")
    for number, path in enumerate(saved[1:], start=1):
        model.load_adapter(path, adapter_name=str(number))
    model.merge_and_unload(adapter_names=[str(number) for number in range(len(saved))]).save_pretrained(folder)


def merge(saved: list[Path], base: Path, output: Path) -> None:
    """Merge the adapters with `ckpt`, with PEFT's bits on tied weights too."""
    found = [adapters.open_adapter(str(path)) for path in saved]
    lora.plan(found, adapters.open_base(found[0], str(base)), as_peft=True).run(output)


def compare(expected: Path, merged: Path, base: Path) -> tuple[int, int, int]:
    """Return the number of equal tensors, the total, and how many differ from the base."""
    theirs, ours, before = weights(expected), weights(merged), weights(base)
    assert ours.keys() == theirs.keys()
    changed = sum(name not in before or not same(theirs[name], before[name]) for name in theirs)
    return sum(same(theirs[name], ours[name]) for name in theirs), len(theirs), changed


def edited(adapter: Path, folder: Path, **changes: Any) -> Path:
    """Copy the adapter and change its config."""
    shutil.copytree(adapter, folder)
    merge_json(folder / "adapter_config.json", changes)
    return folder
