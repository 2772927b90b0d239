"""`converters/huggingface/server_adapters.py`, `peft_options.py`: vLLM and sglang load the adapters correctly.

The loaded adapters are added to the base.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.adapters import EXPERTS, edited, save_adapter, save_base, weights
from tests.support.architectures import numbered
from tests.support.commands import ckpt
from tests.support.places import FIXTURES, REPOSITORY

transformers = pytest.importorskip("transformers", minversion="5.23")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32}
SIZES |= {"moe_intermediate_size": 10, "num_experts_per_tok": 2, "tie_word_embeddings": False}
#: Config entries for a small model with experts.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 12},
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 12},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("llama", torch.float32, tmp_path_factory.mktemp("llama") / "base")


def base_of(model_type: str, folder: Path) -> Path:
    config = transformers.CONFIG_MAPPING[model_type](**SIZES, **MODELS[model_type])
    numbered(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return folder


def served(adapter: Path, server: str, folder: Path, *options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    outcome = ckpt("convert", "peft", "peft", adapter, "--server", server, "-o", folder, *options)
    assert outcome.code == 0, outcome.err
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def check_refused(adapter: Path, server: str, out: Path, code: int, *said: str, options: Sequence[Any] = ()) -> None:
    refused = ckpt("convert", "peft", "peft", adapter, "--server", server, "-o", out, *options)
    assert refused.code == code and all(one in refused.err for one in said), refused
    assert not out.exists()


def scaling(config: dict[str, Any], module: str, server: str) -> float:
    """Compute the scaling like vLLM's `peft_helper.py` and sglang's `lora.py`."""
    found = {}
    for name, value in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        patterns = config[name].items() if server == "vllm" else ()
        found[name] = next((v for key, v in patterns if re.match(rf"(.*\.)?({key})$", module)), value)
    root = sqrt if server == "vllm" and config["use_rslora"] else float
    return float(found["alpha_pattern"] / root(found["rank_pattern"]))


def deltas(config: dict[str, Any], tensors: dict[str, torch.Tensor], server: str) -> dict[str, torch.Tensor]:
    """Return the server's update of each weight, by Hub name."""
    found = {}
    for name in tensors:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if name.endswith("lora_A.weight"):
            a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
            if server == "sglang":
                assert a.shape[0] == b.shape[1] == config["r"]
            found[f"{module}.weight"] = scaling(config, module, server) * (b @ a)
            assert module.rpartition(".")[2] in config["target_modules"]
    return found


def check(adapter: Path, base: Path, server: str, folder: Path) -> int:
    """Check that the base plus the server's updates equals the merged model. Return the number of updated weights."""
    added = deltas(*served(adapter, server, folder / "served"), server)
    assert ckpt("merge-lora", adapter, "--base", base, "--accept-base", "-o", folder / "merged").code == 0
    before, merged = weights(base), weights(folder / "merged")
    assert added.keys() <= before.keys(), sorted(added.keys() - before.keys())[:3]
    for name, tensor in before.items():
        expected = merged[name].double()
        assert (expected != tensor.double()).any() == (name in added), name
        torch.testing.assert_close(tensor.double() + added.get(name, 0), expected, rtol=2e-7, atol=2e-6)
    return len(added)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ALL},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {"target_modules": ALL, "rank_pattern": {"down_proj": 6}, "alpha_pattern": {"down_proj": 14}},
    ],
    ids=["plain", "rslora", "ranks"],
)
def test_layers_are_added_as_they_are_merged(server: str, options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", options)
    assert check(adapter, llama, server, tmp_path) == 2 * len(options["target_modules"])


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("model_type", MODELS)
def test_stacked_experts_are_taken_apart(server: str, model_type: str, tmp_path: Path) -> None:
    base = base_of(model_type, tmp_path / "base")
    names = ["o_proj"] if "deepseek" in model_type or "next" in model_type else ["q_proj", "v_proj"]
    options = {"target_modules": names, "target_parameters": EXPERTS, "rank_pattern": {"gate_up_proj": 2}}
    options["alpha_pattern"] = {"gate_up_proj": 14 / 3}
    adapter = save_adapter(base, tmp_path / "adapter", options)
    num_sparse = 1 if "first_k_dense_replace" in MODELS[model_type] else 2
    assert check(adapter, base, server, tmp_path) >= num_sparse * 4 * 3


@pytest.mark.parametrize("layout", ["grouped_by_expert", "rank_major"])
def test_experts_that_unsloth_packed_are_taken_apart(layout: str, tmp_path: Path) -> None:
    fixture = FIXTURES / "unsloth-moe"
    adapter = edited(fixture / layout, tmp_path / "adapter", base_model_name_or_path=str(fixture / "base"))
    assert check(adapter, fixture / "base", "vllm", tmp_path)
    assert "grouped" not in (tmp_path / "served/adapter_config.json").read_text()


def test_bits_are_those_that_were_trained(tmp_path: Path) -> None:
    base = base_of("qwen3_moe", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    _, found = served(adapter, "vllm", tmp_path / "served")
    trained = load_file(adapter / "adapter_model.safetensors")
    experts = "base_model.model.model.layers.1.mlp.experts"
    a, b = (trained[f"{experts}.base_layer.lora_{factor}.weight"] for factor in "AB")
    assert torch.equal(found[f"{experts}.2.gate_proj.lora_A.weight"], a.reshape(4, 3, -1)[2])
    assert torch.equal(found[f"{experts}.2.up_proj.lora_A.weight"], a.reshape(4, 3, -1)[2])
    assert torch.equal(found[f"{experts}.2.up_proj.lora_B.weight"], b.reshape(20, 3, 4)[10:, :, 2])


def test_vllm_takes_stacked_experts_of_gpt_oss_in_pefts_packing(tmp_path: Path) -> None:
    base = save_base("gpt_oss", torch.float32, tmp_path / "base")
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    adapter = save_adapter(base, tmp_path / "adapter", options)
    config, plain = served(adapter, "vllm", tmp_path / "plain")
    trained = load_file(adapter / "adapter_model.safetensors")
    assert plain.keys() == trained.keys() and all(torch.equal(plain[name], trained[name]) for name in plain)
    assert config["target_parameters"] == EXPERTS
    grouped = edited(adapter, tmp_path / "grouped", lora_B_layout="grouped_by_expert")
    packed = {
        name: b.reshape(len(b), 3, -1).transpose(1, 2).reshape(b.shape).contiguous()
        if ".experts." in name and "lora_B" in name
        else b
        for name, b in trained.items()
    }
    save_file(packed, grouped / "adapter_model.safetensors")
    _, repacked = served(grouped, "vllm", tmp_path / "repacked")
    assert all(torch.equal(repacked[name], trained[name]) for name in trained)
    refused = ckpt("convert", "peft", "peft", adapter, "--server", "sglang", "-o", tmp_path / "none")
    assert refused.code == 2 and "ckpt does not know sglang's expert layout for this model" in refused.err
    one = save_adapter(base, tmp_path / "one", options | {"target_parameters": EXPERTS[:1]})
    refused = ckpt("convert", "peft", "peft", one, "--server", "vllm", "-o", tmp_path / "none")
    assert refused.code == 6 and "both stacked parameters of a layer, or on neither" in refused.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ALL, "use_dora": True}, "with DoRA"),
        ({"target_modules": ALL, "modules_to_save": ["lm_head"]}, "with modules_to_save"),
        ({"target_modules": ALL, "lora_bias": True}, "with trained biases"),
        ({"target_modules": ALL, "trainable_token_indices": [1]}, "with trained tokens"),
        ({"target_modules": ["embed_tokens", "q_proj", "v_proj"]}, "does not load this adapter part"),
        ({"target_modules": ALL, "init_lora_weights": "pissa"}, "with a kind only PEFT can merge"),
    ],
)
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_what_a_server_does_not_compute_is_refused(
    server: str, options: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", options)
    check_refused(adapter, server, tmp_path / "out", 2, said, "use `ckpt merge-lora` to merge it")


@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:]])
def test_experts_that_vllm_would_fail_on_are_refused(parameters: list[str], tmp_path: Path) -> None:
    """First the adapter has one of the two stacked parameters. Then it has both, without one expert's layer."""
    base = base_of("qwen3_moe", tmp_path)
    options = {"target_modules": ["q_proj", "v_proj"], "target_parameters": parameters}
    half = save_adapter(base, tmp_path / "half", options)
    check_refused(half, "vllm", tmp_path / "out", 6, "every expert of a layer, or on none")
    whole = save_adapter(base, tmp_path / "whole", options | {"target_parameters": EXPERTS})
    _, tensors = served(whole, "vllm", tmp_path / "apart")
    gone = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    kept = {name: t for name, t in tensors.items() if not name.startswith(f"{gone}.")}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / "apart/adapter_model.safetensors")
    check_refused(tmp_path / "apart", "vllm", tmp_path / "out", 6, gone.removeprefix("base_model.model."))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"target_modules": ["q_proj"]}, 6, "needs LoRA on v_proj, too, to load it on q_proj"),
        ({"target_modules": ["k_proj", "v_proj"]}, 6, "needs LoRA on q_proj, too, to load it on k_proj"),
        ({"target_modules": ["up_proj"]}, 6, "needs LoRA on gate_proj, too, to load it on up_proj"),
        ({"target_modules": ALL, "alpha_pattern": {"o_proj": 3}}, 2, "uses one scaling for all layers"),
        ({"target_modules": ALL, "rank_pattern": {"o_proj": 6}}, 2, "uses one scaling for all layers"),
    ],
)
def test_what_sglang_would_pass_over_is_refused(
    options: dict[str, Any], code: int, said: str, llama: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", options)
    check_refused(adapter, "sglang", tmp_path / "out", code, said)
    served(adapter, "vllm", tmp_path / "vllm")


#: Models supported by vLLM's attention on a CPU, with their adapters.
LIVE_SIZES = {**SIZES, "vocab_size": 256, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
LIVE_EXPERTS = {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}
LIVE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        {},
        [
            {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
            {"target_modules": ALL, "rank_pattern": {"down_proj": 12}, "alpha_pattern": {"o_proj": 3}},
        ],
    ),
    "qwen3_moe": ({"num_experts": 4, "moe_intermediate_size": 64}, [LIVE_EXPERTS]),
    "gpt_oss": ({"num_local_experts": 4, "intermediate_size": 64}, [LIVE_EXPERTS]),
}


def live_base(model_type: str, folder: Path) -> Path:
    config = transformers.CONFIG_MAPPING[model_type](**LIVE_SIZES | LIVE[model_type][0])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LIVE)
def test_a_live_vllm_computes_what_the_merged_model_does(model_type: str, tmp_path: Path) -> None:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no Python that has vLLM")
    base = live_base(model_type, tmp_path / "base")
    adapters = []
    for number, options in enumerate(LIVE[model_type][1]):
        adapter = save_adapter(base, tmp_path / f"adapter{number}", options)
        served(adapter, "vllm", tmp_path / f"served{number}")
        assert ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / f"merged{number}").code == 0
        adapters.append(tmp_path / f"served{number}")

    def asked(*folders: Path) -> torch.Tensor:
        command = [python, str(REPOSITORY / "tests/support/vllm_serving.py"), *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return torch.tensor(json.loads(done.stdout.splitlines()[-1]))

    plain, *with_adapter = asked(base, *adapters)
    for number, found in enumerate(with_adapter):
        (merged,) = asked(tmp_path / f"merged{number}")
        torch.testing.assert_close(found, merged, rtol=0, atol=1e-4)
        assert (found - plain).abs().max() > 0.1


#: Layers stacked by sglang, in its order.
STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
STACKED |= {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "modules"),
    [
        ("qwen3_moe", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen2_moe", ["q_proj", "v_proj", "gate_proj"]),
        ("deepseek_v3", ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"]),
    ],
)
def test_what_sglang_stacks_adds_up_to_the_merged_model(model_type: str, modules: list[str], tmp_path: Path) -> None:
    python = os.environ.get("SGLANG_PYTHON")
    if not python:
        pytest.skip("SGLANG_PYTHON names no Python that has sglang")
    base = base_of(model_type, tmp_path / "base")
    options = {"target_modules": modules, "target_parameters": EXPERTS}
    adapter = save_adapter(base, tmp_path / "adapter", options)
    served(adapter, "sglang", tmp_path / "served")
    assert ckpt("merge-lora", adapter, "--base", base, "-o", tmp_path / "merged").code == 0
    command = [python, str(REPOSITORY / "tests/support/sglang_loading.py")]
    file = tmp_path / "stacked.safetensors"
    subprocess.run([*command, str(base), str(tmp_path / "served"), str(file)], capture_output=True, check=True)
    with safe_open(file, "pt") as opened:
        scale = float(opened.metadata()["scaling"])
    found = load_file(file)
    before, merged = weights(base), weights(tmp_path / "merged")
    added = {}
    for name in [name for name in found if name.endswith("lora_A.weight")]:
        parent, _, leaf = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").rpartition(".")
        layers = [f"{parent}.{one}.weight" for one in STACKED.get(leaf, [leaf])]
        b = found[name.replace("lora_A", "lora_B")].split([len(before[layer]) for layer in layers])
        for layer, one, other in zip(layers, found[name].chunk(len(layers)), b, strict=True):
            added[layer] = scale * (other.double() @ one.double())
    assert {name for name in added if added[name].any()} == {n for n in before if not torch.equal(before[n], merged[n])}
    for name, delta in added.items():
        torch.testing.assert_close(before[name].double() + delta, merged[name].double(), rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize(("one", "other"), [("q_a_proj", "kv_a_proj_with_mqa"), ("kv_a_proj_with_mqa", "q_a_proj")])
def test_halves_of_latent_attention_that_sglang_stacks_are_refused_alone(one: str, other: str, tmp_path: Path) -> None:
    base = base_of("deepseek_v3", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": [one, "o_proj"]})
    check_refused(adapter, "sglang", tmp_path / "out", 6, f"needs LoRA on {other}, too, to load it on {one}")


def test_a_rank_above_what_vllm_serves_is_refused(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 513}})
    check_refused(adapter, "vllm", tmp_path / "out", 2, "at most 512", "found: 513")


def test_experts_of_a_model_that_is_not_known_are_refused(tmp_path: Path) -> None:
    base = base_of("qwen3_moe", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    gone = edited(adapter, tmp_path / "gone", base_model_name_or_path="org/elsewhere")
    check_refused(gone, "vllm", tmp_path / "out", 2, "give the base's config.json with --config")
    served(gone, "vllm", tmp_path / "out", "--config", base)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mixtral"}')
    check_refused(gone, "vllm", tmp_path / "no", 2, "found: model_type mixtral", options=["--config", other])


def test_experts_of_an_unsloth_adapter_without_its_record_are_refused(tmp_path: Path) -> None:
    fixture = FIXTURES / "unsloth-moe"
    marks = {"unsloth_fixed": True, "base_model_class": "Qwen3MoeForCausalLM"}
    changes = {"lora_B_layout": None, "unsloth_fused_expert_lora": None, "auto_mapping": marks}
    changes["base_model_name_or_path"] = str(fixture / "base")
    adapter = edited(fixture / "rank_major", tmp_path / "adapter", **changes)
    check_refused(adapter, "vllm", tmp_path / "out", 2, '"lora_B_layout": "grouped_by_expert"')


def test_it_is_not_verified_by_names_that_are_others(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", {"target_modules": ALL})
    check_refused(adapter, "vllm", tmp_path / "out", 2, "--verify compares tensors by name", options=["--verify"])


def test_another_rank_than_the_configs_is_refused(tmp_path: Path) -> None:
    base = base_of("qwen3_moe", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    wrong = edited(adapter, tmp_path / "wrong", r=5)
    check_refused(wrong, "vllm", tmp_path / "out", 6, "do not match PEFT's layout")
