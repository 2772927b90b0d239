"""`ckpt/commands/merge_lora/merge.py`, `arithmetic.py`, `layer.py`: merged adapters match PEFT's own merge."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt.commands.merge_lora import arithmetic
from ckpt.commands.merge_lora import find as adapters
from ckpt.commands.merge_lora import merge as lora
from ckpt.errors import CorruptError, UsageError
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import Layout
from converters.gguf.header import read_header
from tests.support.adapters import (
    BF16,
    EXPERTS,
    MODELS,
    MOE,
    TABLE,
    Tables,
    compare,
    differing,
    edited,
    load_base,
    merge,
    merge_by_peft,
    same,
    save_adapter,
    save_base,
    weights,
)
from tests.support.commands import ckpt, process
from tests.support.engines import launch
from tests.support.places import FIXTURES
from tests.support.sampling import sample
from train.config import Config
from train.models import build_model

# -- every kind on every model -------------------------------------------------------------------------------
BIASED = ("gpt2", "qwen2", "gpt_oss")


def kinds(model: str) -> dict[str, list[dict[str, Any]]]:
    """Return options of adapters to merge, by kind."""
    n = MODELS[model]
    first, last = n.linear[0], n.linear[-1]
    found: dict[str, list[dict[str, Any]]] = {
        "linear": [{"target_modules": n.linear}],
        "all-linear": [{"target_modules": "all-linear"}],
        "rank and alpha patterns": [
            {"target_modules": n.linear, "rank_pattern": {first: 5, rf"1\..*{last}": 2}, "alpha_pattern": {last: 11}}
        ],
        "rsLoRA, patterns": [{"target_modules": n.linear, "use_rslora": True, "rank_pattern": {last: 2}}],
        "DoRA": [{"target_modules": n.linear, "use_dora": True}],
        "DoRA on embeddings": [{"target_modules": [first, n.embedding], "use_dora": True}],
        "embeddings": [{"target_modules": [first, n.embedding]}],
        "embeddings and head": [{"target_modules": [n.embedding, n.head]}],
        "head": [{"target_modules": [n.head]}],
        "modules_to_save": [{"target_modules": [first], "modules_to_save": [n.head]}],
        "modules_to_save, embeddings": [{"target_modules": [first], "modules_to_save": [n.embedding]}],
        "modules_to_save, kept tied": [
            {"target_modules": [first], "modules_to_save": [n.head], "ensure_weight_tying": True}
        ],
        "trained tokens": [{"target_modules": [first], "trainable_token_indices": {n.embedding: [1, 4, 7]}}],
        "layers_to_transform": [{"target_modules": n.linear, "layers_to_transform": [1]}],
        "exclude_modules": [{"target_modules": n.linear, "exclude_modules": rf".*1\..*{last}"}],
        "two in turn": [{"target_modules": n.linear}, {"target_modules": [last], "use_rslora": True}],
    }
    if model == "llama":
        from peft import KasaConfig, MontecloraConfig, VeloraConfig
        from peft.tuners.lora.config import BdLoraConfig

        blocks = BdLoraConfig(target_modules_bd_a=n.linear[::2], target_modules_bd_b=n.linear[1::2], nblocks=5)
        found["KaSA"] = [{"target_modules": n.linear, "kasa_config": KasaConfig()}]
        found["VeLoRA"] = [{"target_modules": n.linear, "velora_config": VeloraConfig(num_groups=2)}]
        found["MonteCLoRA"] = [{"target_modules": n.linear, "monteclora_config": MontecloraConfig(num_samples=2)}]
        found["block-diagonal"] = [{"target_modules": n.linear, "use_bdlora": blocks, "rank_pattern": {".*": 5}}]
        found["OLoRA"] = [{"target_modules": n.linear, "init_lora_weights": "olora"}]
        found["MiCA"] = [{"target_modules": [*n.linear, n.embedding], "init_lora_weights": "mica"}]
    if model in ("llama", "gpt2"):
        found["PiSSA"] = [{"target_modules": n.linear, "init_lora_weights": "pissa", "rank_pattern": {last: 2}}]
    if model in BIASED:
        found["lora_bias"] = [{"target_modules": [first], "lora_bias": True}]
        found["bias=all"] = [{"target_modules": [first], "bias": "all"}]
        found["bias=lora_only"] = [{"target_modules": [first], "bias": "lora_only"}]
    if model in MOE:
        found["target_parameters"] = [
            {"target_modules": [first], "target_parameters": EXPERTS, "rank_pattern": {"down_proj": 2}}
        ]
        found["one of the experts' parameters"] = [{"target_modules": [first], "target_parameters": EXPERTS[1:]}]
        router = "mlp.gate.weight" if model == "qwen3_moe" else "mlp.router.weight"
        found["target_parameters, router"] = [{"target_modules": [], "target_parameters": [router]}]
    return found


@functools.cache
def cases() -> list[tuple[str, str]]:
    """Return models and kinds. The sample has each kind in each class of layers, and those of experts in each model."""
    every = [(model, kind) for model in MODELS for kind in kinds(model)]

    def facets(case: tuple[str, str]) -> list[object]:
        model, kind = case
        return [model, (kind, model) if "param" in kind else (kind, MODELS[model].linear[0], model in MOE)]

    return sample(every, facets)


@pytest.mark.parametrize("model", MODELS)
def test_equals_pefts_own_merge(model: str, bases: dict[str, Path], tmp_path: Path, tables: Tables) -> None:
    failed, options_of = [], kinds(model)
    for number, (_, kind) in enumerate(case for case in cases() if case[0] == model):
        options = options_of[kind]
        folder = tmp_path / str(number)
        saved = [save_adapter(bases[model], folder / f"adapter-{i}", o, seed=i) for i, o in enumerate(options)]
        merge_by_peft(bases[model], saved, folder / "peft")
        merge(saved, bases[model], folder / "ours")
        equal, total, changed = compare(folder / "peft", folder / "ours", bases[model])
        tables[TABLE][kind][model] = f"{equal}/{total} ({changed})"
        tie = [json.loads((folder / f / "config.json").read_text())["tie_word_embeddings"] for f in ("peft", "ours")]
        if equal != total or not changed or tie[0] != tie[1]:
            failed.append(f"{kind}: {equal} of {total} equal, {changed} changed, tied {tie}")
        shutil.rmtree(folder)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe"])  # gpt_oss keeps fp32 norms in an fp16 model
def test_the_merge_is_in_the_bases_dtype(model: str, dtype: torch.dtype, tmp_path: Path, tables: Tables) -> None:
    base = save_base(model, dtype, tmp_path / "base")
    options: dict[str, Any] = {"target_modules": [*MODELS[model].linear, MODELS[model].embedding]}
    options |= {"target_parameters": EXPERTS} if model in MOE else {"use_dora": True}
    saved = save_adapter(base, tmp_path / "adapter", options)
    merge_by_peft(base, [saved], tmp_path / "peft")
    merge([saved], base, tmp_path / "ours")
    equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", base)
    assert equal == total
    assert changed
    tables[TABLE][f"{str(dtype).removeprefix('torch.')} base"][model] = f"{equal}/{total} ({changed})"


def test_a_number_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    base = save_base("llama", torch.float32, tmp_path / "base")
    saved = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"]})
    fqn = next(name for name in weights(base) if "q_proj" in name)
    stored = weights(base)
    stored[fqn][1, 2] = -1e30
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    command = ("merge-lora", saved, "--base", base, "-o", tmp_path / "out", "--dtype")
    refused = ckpt(*command, "fp16")
    assert (
        refused.code == 6 and f"too large for float16\n  file: {base}\n  tensor: {fqn}\n  found: 1e+30" in refused.err
    )
    assert not (tmp_path / "out").exists()
    assert ckpt(*command, "bf16").code == 0


def test_an_adapter_saved_in_bf16_is_merged_in_fp32_as_peft_loads_it(bases: dict[str, Path], tmp_path: Path) -> None:
    saved = save_adapter(bases["llama"], tmp_path / "adapter", {"target_modules": "all-linear"})
    file = saved / "adapter_model.safetensors"
    save_file({name: t.to(BF16) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    merge_by_peft(bases["llama"], [saved], tmp_path / "peft")
    merge([saved], bases["llama"], tmp_path / "ours")
    equal, total, _ = compare(tmp_path / "peft", tmp_path / "ours", bases["llama"])
    assert equal == total


def test_without_torch_it_says_what_it_takes(fixtures: Path, tmp_path: Path) -> None:
    """The message has one line and comes before any write."""
    script = "import sys\nsys.modules['torch'] = None\nfrom ckpt.cli import main\nmain()"
    done = process("merge-lora", fixtures / "lora-zero3", "-o", tmp_path / "out", script=script)
    assert (done.code, "Traceback" in done.err, (tmp_path / "out").exists()) == (2, False, False)
    assert "merging needs torch" in done.err and "pip install torch" in done.err


def test_an_adapter_in_a_torch_file(bases: dict[str, Path], tmp_path: Path) -> None:
    saved = save_adapter(bases["llama"], tmp_path / "adapter", {"target_modules": "all-linear"})
    merge([saved], bases["llama"], tmp_path / "safe")
    torch.save(load_file(saved / "adapter_model.safetensors"), saved / "adapter_model.bin")
    (saved / "adapter_model.safetensors").unlink()
    merge([saved], bases["llama"], tmp_path / "torch")
    expected, found = weights(tmp_path / "safe"), weights(tmp_path / "torch")
    assert all(same(expected[name], found[name]) for name in expected)


class Convolutions(nn.Module):
    """A custom model with 1-, 2- and 3-dimensional convolutions, a 1x1 kernel and a square matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(3, 5, 3)
        self.plane = nn.Conv2d(5, 7, (3, 2))
        self.point = nn.Conv2d(7, 4, 1)
        self.space = nn.Conv3d(4, 3, 2)
        self.square = nn.Linear(6, 6)


@pytest.mark.parametrize("use_dora", [False, True])
def test_convolutions(use_dora: bool, tmp_path: Path, tables: Tables) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    model = Convolutions()
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    layers = ["line", "plane", "point", "space", "square"]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=layers, use_dora=use_dora, init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    fresh = Convolutions()
    fresh.load_state_dict(load_file(tmp_path / "base" / "model.safetensors"))
    expected = PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().state_dict()
    merge([tmp_path / "adapter"], tmp_path / "base", tmp_path / "ours")
    found = weights(tmp_path / "ours")
    equal = sum(same(expected[name], found[name]) for name in expected)
    tables[TABLE]["convolutions" + (", DoRA" if use_dora else "")]["own model"] = f"{equal}/{len(expected)} (5)"
    assert equal == len(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_torch_s_own(dtype: torch.dtype, tmp_path: Path, tables: Tables) -> None:
    """PEFT merges the output projection of `nn.MultiheadAttention` twice, like the trained forward pass."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def fresh() -> nn.Module:
        return nn.ModuleDict({"pool": nn.ModuleDict({"attn": nn.MultiheadAttention(10, 2)}), "attn": nn.Linear(10, 4)})

    model = fresh().to(dtype)
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    options = {"target_modules": ["attn"], "init_lora_weights": False}
    for name, own in (("one", {"r": 4, "lora_alpha": 12}), ("two", {"r": 2, "rank_pattern": {"pool.attn": 3}})):
        torch.manual_seed(len(name) + own["r"])
        wrapped = get_peft_model(fresh().to(dtype), LoraConfig(**options, **own))
        wrapped.save_pretrained(tmp_path / name)
    given = [tmp_path / "one", tmp_path / "two"]
    for adapters_given in (given[:1], given[1:], given):
        expected = fresh().to(dtype)
        expected.load_state_dict(load_file(tmp_path / "base" / "model.safetensors"))
        for adapter in adapters_given:
            expected = PeftModel.from_pretrained(expected, adapter).merge_and_unload()
        out = tmp_path / f"ours-{len(list(tmp_path.iterdir()))}"
        merge(adapters_given, tmp_path / "base", out)
        found = weights(out)
        theirs = expected.state_dict()
        assert differing(found, theirs) == []
    tables[TABLE][f"nn.MultiheadAttention, {str(dtype).removeprefix('torch.')}"]["own model"] = "6/6 (3)"


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(6, 12, 3, groups=2), nn.Conv1d(6, 6, 3, groups=6)], ids=["two groups", "depthwise"]
)
def test_convolutions_with_groups_are_not_merged(layer: nn.Module, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = nn.ModuleDict({"layer": layer})
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    wrapped = get_peft_model(model, LoraConfig(r=6, target_modules=["layer"], init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    done = ckpt("merge-lora", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "PEFT does not merge into a convolution with groups" in done.err and "layer" in done.err


def test_an_adapter_of_single_experts(tmp_path: Path, tables: Tables) -> None:
    """With transformers 4, each expert had its own linear layer, and adapters from that time match it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = build_model(Config(model="qwen3_moe")).config.to_dict() | {"mlp_only_layers": []}
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).to(BF16).save_pretrained(base)
    saved = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"]})
    factors = load_file(saved / "adapter_model.safetensors")
    for name, tensor in weights(base).items():
        if ".experts." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(3, tensor.shape[1])
            factors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(tensor.shape[0], 3)
    save_file(factors, saved / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    saved = edited(saved, tmp_path / "old", target_modules=targets, base_model_name_or_path=str(base))
    merge_by_peft(base, [saved], tmp_path / "peft")
    merge([saved], base, tmp_path / "ours")
    equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", base)
    tables[TABLE]["single experts (transformers 4)"]["qwen3_moe"] = f"{equal}/{total} ({changed})"
    assert (equal, changed) == (total, 2 + 2 * 5 * 3)


# -- adapters from sharded runs ------------------------------------------------------------------------------
def gathered(run: Path, config: Config) -> tuple[Any, Path]:
    """Return the PEFT model with weights gathered by the live engine, and the file with its logits."""
    model: Any = build_model(config).to(torch.float32)
    (file,) = [path for path in (run / "truth").glob("*.safetensors") if "logits" not in path.name]
    truth = {name.removeprefix("weight/"): t for name, t in load_file(file).items() if name.startswith("weight/")}
    assert set(model.load_state_dict(truth, strict=False).unexpected_keys) == set()
    return model.eval(), file.with_name(f"{file.stem}-logits.safetensors")


@pytest.mark.slow
def test_adapter_of_a_sharded_run(tmp_path: Path, tables: Tables) -> None:
    """For zero3 and fsdp2: extract the adapter, merge it onto the checkpoint's base, load it, compare logits."""
    from peft import get_peft_model_state_dict

    options = {"model": "llama", "dtype": "fp32", "lora": 3, "steps": 2, "truth": True}
    jobs = [{**options, "strategy": strategy, "output": str(tmp_path / strategy)} for strategy in ("zero3", "fsdp2")]
    launch(jobs, 2, tmp_path)
    for job in jobs:
        run = tmp_path / str(job["strategy"])
        model, file = gathered(run, Config(**job))
        stored = load_file(file)
        result = ckpt("convert", "auto", "peft", run)
        assert result.code == 0, result.err
        adapter = run.with_name(f"{run.name}-peft")
        expected, found = get_peft_model_state_dict(model), load_file(adapter / "adapter_model.safetensors")
        assert differing(found, expected) == []
        result = ckpt("merge-lora", run, "-v")
        assert result.code == 0, result.err
        assert "using the base model in the checkpoint itself" in result.err
        folder = run.with_name(f"{run.name}-merged")
        merged = model.merge_and_unload()
        theirs, ours = merged.state_dict(), weights(folder)
        equal = sum(same(theirs[name], ours[name]) for name in ours)
        assert equal == len(theirs)
        with torch.no_grad():
            expected_logits = merged(input_ids=stored["input_ids"]).logits
            logits = load_base(folder).eval()(input_ids=stored["input_ids"]).logits
        assert same(expected_logits, logits)
        torch.testing.assert_close(logits, stored["logits"].float(), rtol=2e-2, atol=2e-2)  # the live, unmerged model
        assert ckpt("verify", "--loads", folder).code == 0
        tables[TABLE][f"out of a {job['strategy']} run"]["llama"] = f"{equal}/{len(theirs)} (14)"


@pytest.mark.parametrize("at_once", [1, 100, 1000])
def test_rows_are_merged_one_after_another(
    at_once: int, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have PEFT's bits, also if a tensor is cut at its end, and a change in the last rows is found."""
    monkeypatch.setattr(arithmetic, "AT_ONCE", at_once)
    saved = save_adapter(bases["llama"], tmp_path / "adapter", {"target_modules": "all-linear"})
    file = saved / "adapter_model.safetensors"
    factors = load_file(file)
    first, *_, last = (factor for name, factor in factors.items() if "lora_B" in name)
    first[:-1], last[:] = 0, 0
    save_file(factors, file, metadata={"format": "pt"})
    merge_by_peft(bases["llama"], [saved], tmp_path / "peft")
    told = json.loads(ckpt("merge-lora", saved, "--base", bases["llama"], "-o", tmp_path / "ours", "--json").out)
    equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", bases["llama"])
    assert (equal, told["targets"]) == (total, {"changed": changed, "zero": 1, "unchanged": []})
    assert changed == len(factors) // 2 - 1


# -- memory and errors ---------------------------------------------------------------------------------------
def test_shards_and_little_memory(bases: dict[str, Path], tmp_path: Path) -> None:
    """A merge computes experts as one tensor, but writes many tensors to several files."""
    saved = save_adapter(bases["qwen3_moe"], tmp_path / "adapter", {"target_modules": [], "target_parameters": EXPERTS})
    merge([saved], bases["qwen3_moe"], tmp_path / "one")
    adapter = adapters.open_adapter(str(saved))
    base = adapters.open_base(adapter, None)
    plan = lora.plan([adapter], base, Layout(max_shard_size=3000), Resources(max_memory=1 << 20, workers=2))
    plan.run(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 10
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert differing(one, many) == []


def test_a_quantized_gguf_base_needs_dequantize(tmp_path: Path) -> None:
    """A plain GGUF base is merged like its Hugging Face folder."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    model, out = FIXTURES / "gguf/llama", tmp_path / "out"
    saved = save_adapter(model, tmp_path / "adapter", {"target_modules": ["q_proj"]})

    def merge_into(base: Path, *options: str) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        return ckpt("merge-lora", saved, "--base", base, "--config", model, "-o", out, *options)

    quantized = Path(shutil.copy(FIXTURES / "gguf/llama-q8_0.gguf", tmp_path / "base.gguf"))
    refused = merge_into(quantized)
    assert refused.code == UsageError.exit_code, refused.err
    assert "can't merge an adapter into a quantized base weight" in refused.err
    assert "found: q8_0" in refused.err and "--base" in refused.err and "--dequantize" in refused.err
    assert not out.exists()
    merged = merge_into(quantized, "--dequantize", "--dtype", "bf16")
    assert merged.code == 0 and "stored in q8_0" in merged.err and "nothing" not in merged.err, merged.err
    of_blocks = weights(out)
    assert merge_into(FIXTURES / "gguf/llama-bf16.gguf", "--dtype", "bf16").code == 0
    of_plain = weights(out)
    assert merge_into(model).code == 0
    assert differing(of_plain, weights(out)) == []
    assert "model.layers.0.self_attn.q_proj.weight" in differing(of_blocks, of_plain)
    entry = next(one for one in read_header(quantized).entries if one.type.name == "q8_0")
    data = bytearray(quantized.read_bytes())
    data[entry.start : entry.start + 2] = b"\0\x7e"
    quantized.write_bytes(data)
    damaged = merge_into(quantized, "--dequantize")
    assert damaged.code == CorruptError.exit_code and entry.name in damaged.err, damaged.err
    assert not out.exists()


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "mxfp4"])
def test_a_quantized_base_is_refused(method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Weights have the names, shapes and dtypes stored by these libraries. Their values don't matter."""
    model = "gpt_oss" if method == "mxfp4" else "llama"
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS if method == "mxfp4" else None}
    saved = save_adapter(bases[model], tmp_path / "adapter", options)
    base = tmp_path / "base"
    shutil.copytree(bases[model], base)
    stored = weights(base)
    for name in [name for name in stored if name.endswith(("q_proj.weight", "gate_up_proj", "down_proj"))]:
        if method == "bitsandbytes" and name.endswith("weight"):
            stored[name] = torch.zeros(stored[name].numel() // 2, 1, dtype=torch.uint8)
            stored[f"{name}.absmax"] = torch.zeros(9, dtype=torch.uint8)
        elif method == "gptq" and name.endswith("weight"):
            stored[f"{name.removesuffix('.weight')}.qweight"] = torch.zeros(4, stored.pop(name).shape[0]).int()
        elif method == "mxfp4" and ".experts." in name:
            stored[f"{name}_scales"] = torch.zeros(5, 7, 1, dtype=torch.uint8)
            stored[f"{name}_blocks"] = torch.zeros(5, stored.pop(name).shape[1], 1, 16, dtype=torch.uint8)
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (base / "config.json").write_text(json.dumps(config))
    result = ckpt("merge-lora", saved, "--base", base, "-o", tmp_path / "out")
    assert result.code == UsageError.exit_code, result.err
    assert "can't merge an adapter into a quantized base weight" in result.err
    assert method in result.err
    assert "full-precision" in result.err
    assert ("--dequantize" in result.err) == (method != "gptq")  # the hint works
    assert not (tmp_path / "out").exists()
