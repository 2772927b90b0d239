"""`ckpt/commands/merge_lora/experts.py`: LoRA on single experts of a stacked tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.adapters import differing, weights
from tests.support.commands import ckpt

RANK, ALPHA = 4, 8
BF16 = torch.bfloat16


def base_of(model: str, folder: Path) -> tuple[Path, Any]:
    """Save and return a tiny model with experts."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    of = {"qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 16, "decoder_sparse_step": 1}}
    of["gpt_oss"] = {"num_local_experts": 3, "intermediate_size": 16}
    config = transformers.CONFIG_MAPPING[model](**{**sizes, **of[model], "layer_types": ["full_attention"]})
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    built.save_pretrained(folder)
    return folder, built


def by_peft(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's weight, [out, in], after PEFT's merge."""
    from peft import LoraConfig, get_peft_model

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    wrapped = get_peft_model(torch.nn.Sequential(layer), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"]))
    inner = wrapped.base_model.model[0]
    inner.lora_A["default"].weight.data.copy_(a)
    inner.lora_B["default"].weight.data.copy_(b)
    merged: torch.Tensor = wrapped.merge_and_unload()[0].weight.detach()
    return merged


def saved(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def pair(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random factors for a layer of (rows, columns), or for several layers in one tensor."""
    *many, rows, columns = sizes
    return torch.randn(*many, RANK, columns) * 0.1, torch.randn(*many, rows, RANK) * 0.1


EXPERTS = "model.layers.0.mlp.experts"


def merged(base: Path, adapter: Path, model: Any, out: Path) -> None:
    """Merge, and compare with `model`'s weights as written by `save_pretrained`."""
    done = ckpt("merge-lora", adapter, "--base", base, "-o", out)
    assert done.code == 0, done.err
    model.save_pretrained(out.parent / "truth")
    theirs, ours = weights(out.parent / "truth"), weights(out)
    assert differing(theirs, ours) == []
    assert ckpt("verify", base, out.parent / "truth", "--adapter", adapter).code == 0


def test_a_linear_layer_for_each_expert(tmp_path: Path) -> None:
    """Unsloth's gpt-oss has `gate_up_projs` and `down_projs`. Their rows are the stacked tensor's columns."""
    base, model = base_of("gpt_oss", tmp_path / "base")
    tensors: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0].mlp
    for name, rows, columns in (("gate_up", 32, 32), ("down", 32, 16)):
        stacked = getattr(layer.experts, f"{name}_proj").data
        for expert in range(3):
            a, b = pair(rows, columns)
            tensors |= {f"{EXPERTS}.{name}_projs.{expert}.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
            stacked[expert] = by_peft(stacked[expert].T, a, b).T
    a, b = pair(3, 32)
    tensors |= {f"model.layers.0.mlp.router.linear.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
    layer.router.weight.data.copy_(by_peft(layer.router.weight.data, a, b))
    merged(base, saved(tmp_path / "adapter", tensors), model, tmp_path / "out")


@pytest.mark.parametrize("shared", [None, "A", "B"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_factors_of_all_experts_in_one_tensor(kind: str, shared: str | None, tmp_path: Path) -> None:
    """Tinker: w1 is gate, w3 up, w2 down, and experts may share a factor. gpt-oss interleaves gate and up."""
    base, model = base_of(kind, tmp_path / "base")
    experts, is_oss = model.model.layers[0].mlp.experts, kind == "gpt_oss"
    tensors: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("w1", 16, 32), ("w3", 16, 32), ("w2", 32, 16)):
        a, b = pair(3, rows, columns)
        a, b = a[:1] if shared == "A" else a, b[:1] if shared == "B" else b
        tensors |= {f"{EXPERTS}.{name}.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
        stacked = (experts.down_proj if name == "w2" else experts.gate_up_proj).data
        for expert in range(3):
            view = stacked[expert].T if is_oss else stacked[expert]
            if name != "w2":
                first = name == "w1"
                view = view[0 if first else 1 :: 2] if is_oss else view[:16] if first else view[16:]
            view.copy_(by_peft(view, a[0 if shared == "A" else expert], b[0 if shared == "B" else expert]))
    attention = "attn" if is_oss else "self_attn"
    a, b = pair(32, 32)
    tensors |= {f"model.layers.0.{attention}.q_proj.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
    query = model.model.layers[0].self_attn.q_proj.weight.data
    query.copy_(by_peft(query, a, b))
    a, b = pair(64, 32)
    tensors |= {f"model.unembed_tokens.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
    model.lm_head.weight.data.copy_(by_peft(model.lm_head.weight.data, a, b))
    merged(base, saved(tmp_path / "adapter", tensors), model, tmp_path / "out")


@pytest.mark.parametrize(
    ("module", "sizes"),
    [("w1", (2, 16, 32)), ("w1", (3, 32, 32)), ("w2", (16, 32)), ("w2", (1, 32, 16)), ("w4", (3, 16, 32))],
)
def test_factors_that_do_not_fit_are_refused(module: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    base, _ = base_of("qwen3_moe", tmp_path / "base")
    a, b = pair(*sizes)
    tensors = {f"{EXPERTS}.{module}.lora_{one}.weight": t for one, t in (("A", a), ("B", b))}
    adapter = saved(tmp_path / "adapter", tensors)
    refused = ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    assert refused.code == 6 and f"experts.{module}" in refused.err, refused.err
