"""`ckpt/commands/merge_lora/base_names.py`: adapters with names from the base's files or from transformers 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.adapters.config import parse_config
from ckpt.adapters.names import parse_name
from ckpt.commands.merge_lora import base_names
from ckpt.commands.merge_lora.find import Adapter, Factor
from ckpt.plan.checkpoint import TRANSFORMERS, Checkpoint, ReadRequest
from ckpt.plan.tensors import Tensor
from ckpt.state.naming import to_namespace
from converters.huggingface.hf import HF
from converters.names.transformers import relation
from tests.support.adapters import differing, same, weights
from tests.support.architectures import tiny_model
from tests.support.commands import ckpt

#: Architectures with modules renamed by transformers on load, and the number of renamed matrices.
RENAMED = {
    "gpt_neox": 1,
    "mixtral": 2,
    "phimoe": 2,
    "minimax_m2": 2,
    "granitemoe": 2,
    "nemotron_h": 12,
    "deepseek_v4": 23,
    "llava": 31,
    "gemma3": 31,
    "qwen2_vl": 25,
    "qwen2_5_vl": 27,
    "inkling2_text": 18,
    "vit": 12,
    "cohere_asr": 33,
}


def adapter_of(modules: list[str], of: Checkpoint) -> Adapter:
    """Return a LoRA adapter for `modules` without values."""
    named = [f"base_model.model.{module}.lora_{one}.weight" for module in modules for one in "AB"]
    config = parse_config({"peft_type": "LORA", "r": 2, "lora_alpha": 2}, Path("adapter_config.json"))
    factors = {fqn: Factor(fqn, (2, 2), lambda: torch.zeros(2, 2), of) for fqn in named}
    return Adapter("adapter", Path("adapter"), config, of, factors)


def matrices(checkpoint: Checkpoint) -> dict[Any, str]:
    """Return modules with a matrix, by their weight's place in the file."""

    def place(tensor: Tensor) -> tuple[int, Any]:
        return next(fragment.extent.offset for fragment in tensor.fragments()), tensor.shape

    found = {place(tensor): fqn for (fqn, _), tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    return {key: fqn.removesuffix(".weight") for key, fqn in found.items() if fqn.endswith(".weight")}


def in_memory(model_type: str, folder: Path) -> Checkpoint:
    model = tiny_model(model_type)
    model.save_pretrained(folder)
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    base = HF.read(folder, ReadRequest())
    return to_namespace(replace(base, config=config), TRANSFORMERS)


@pytest.mark.parametrize("asked", ["tables", "transformers"])
@pytest.mark.parametrize("model_type", RENAMED)
def test_names_of_the_file_become_those_in_memory(
    model_type: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked == "transformers":
        monkeypatch.setattr(relation, "declared", lambda config: None)
    memory = in_memory(model_type, tmp_path)
    file = matrices(HF.read(tmp_path, ReadRequest()))
    inner = {key: name for key, name in matrices(memory).items() if key in file}
    moved = {file[key]: name for key, name in inner.items() if file[key] != name}
    assert len(moved) == RENAMED[model_type]
    found = base_names.in_memory(adapter_of([file[key] for key in inner], memory), memory)
    assert {parse_name(fqn).module for fqn in found.factors} == set(inner.values())
    assert all(found.config.former[name] == old for old, name in moved.items())
    assert "names from another transformers release" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        (
            "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
            "model.vision_tower.encoder.layers.0.self_attn.q_proj",
        ),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "model.vision_tower.encoder.layers.0.mlp.fc1"),
    ],
)
def test_every_spelling_of_transformers_4(name: str, expected: str, tmp_path: Path) -> None:
    memory = in_memory("llava", tmp_path)
    found = base_names.in_memory(adapter_of([name], memory), memory)
    assert {parse_name(fqn).module for fqn in found.factors} == {expected}


def test_names_that_are_known_stay_and_so_do_unknown_ones(tmp_path: Path) -> None:
    memory = in_memory("mixtral", tmp_path)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate", "model.layers.0.other.q_proj"):
        adapter = adapter_of([module], memory)
        assert base_names.in_memory(adapter, memory) is adapter


def test_a_text_model_is_taken_for_the_one_in_a_vision_model_from_tinker_alone(tmp_path: Path) -> None:
    memory = in_memory("llava", tmp_path)
    adapter = adapter_of(["model.layers.0.self_attn.q_proj"], memory)
    assert base_names.in_memory(adapter, memory) is adapter
    raw = {**adapter.config.raw, "target_modules": "all-linear"}
    found = base_names.in_memory(replace(adapter, config=replace(adapter.config, raw=raw)), memory)
    assert {parse_name(fqn).module for fqn in found.factors} == {"model.language_model.layers.0.self_attn.q_proj"}


def test_rows_that_are_permuted_are_no_renaming(tmp_path: Path) -> None:
    memory = in_memory("mistral_large4", tmp_path)
    adapter = adapter_of(["vision_encoder.transformer.layers.0.attention.wq"], memory)
    assert base_names.in_memory(adapter, memory) is adapter


# -- merging -------------------------------------------------------------------------------------------------
def save(folder: Path, modules: Mapping[str, tuple[int, int]], **config: Any) -> Path:
    """Save an adapter for `modules`, given with rows and columns."""
    generator = torch.Generator().manual_seed(3)
    folder.mkdir()
    ranks = config.get("rank_pattern", {})
    tensors = {}
    for module, (num_out, num_in) in modules.items():
        rank = next((rank for name, rank in ranks.items() if module.endswith(name)), 4)
        for one, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            tensors[f"base_model.model.{module}.lora_{one}.weight"] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    folder = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


QUERY = {"model.layers.0.self_attn.q_proj": (32, 32)}
ROUTER = {"model.layers.0.block_sparse_moe.gate": (2, 32)}
EXPERTS = {f"model.layers.0.block_sparse_moe.experts.{n}.{w}": (48, 32) for n in range(2) for w in ("w1", "w3")} | {
    f"model.layers.0.block_sparse_moe.experts.{n}.w2": (32, 48) for n in range(2)
}


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["router", "router and experts"])
def test_a_router_by_its_name_in_the_file(experts: dict[str, tuple[int, int]], mixtral: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import MixtralForCausalLM

    adapter = save(tmp_path / "adapter", QUERY | ROUTER | experts)
    done = ckpt("merge-lora", adapter, "--base", mixtral, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    model = PeftModel.from_pretrained(MixtralForCausalLM.from_pretrained(mixtral), adapter).merge_and_unload()
    model.save_pretrained(tmp_path / "truth")
    theirs, ours, base = weights(tmp_path / "truth"), weights(tmp_path / "out"), weights(mixtral)
    assert differing(theirs, ours) == []
    assert not same(
        ours["model.layers.0.block_sparse_moe.gate.weight"], base["model.layers.0.block_sparse_moe.gate.weight"]
    )
    assert ckpt("verify", mixtral, tmp_path / "truth", "--adapter", adapter).code == 0


def test_patterns_of_the_config_are_of_the_former_names(mixtral: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"block_sparse_moe.gate": 2}, "alpha_pattern": {"block_sparse_moe.gate": 6}}
    adapter = save(tmp_path / "adapter", QUERY | ROUTER, peft_version="0.21.2", **patterns)
    assert ckpt("merge-lora", adapter, "--base", mixtral, "-o", tmp_path / "out").code == 0
    name = next(iter(ROUTER))
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
    expected = weights(mixtral)[f"{name}.weight"] + 3 * (b @ a)
    torch.testing.assert_close(weights(tmp_path / "out")[f"{name}.weight"], expected)


def test_a_layer_of_another_model_is_refused_with_the_nearest_name(mixtral: Path, tmp_path: Path) -> None:
    adapter = save(tmp_path / "adapter", {"model.layers.0.attn.q_proj": (32, 32)})
    refused = ckpt("merge-lora", adapter, "--base", mixtral, "-o", tmp_path / "out")
    assert refused.code == 6
    assert "expected: a layer of the base with model.layers.0.attn.q_proj.weight" in refused.err
    assert "found: none of this name; model.layers.0.self_attn.q_proj.weight is the nearest" in refused.err
