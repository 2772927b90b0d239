"""Merged LoRA adapters against PEFT's own merge, bit for bit; adapters out of sharded runs; what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt as toolkit
from ckpt.errors import CorruptError, LossError, NotFoundError, UsageError
from ckpt.lora import find as adapters
from ckpt.lora import merge as lora
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import MASTER, WEIGHT, Layout
from ckpt.state import adapter as adapter_names
from ckpt.state.adapter import parse_config, parse_name
from tests.support.adapters import load_base, same, save_adapter, weights
from tests.support.commands import ckpt, process
from tests.support.engines import launch
from train.config import Config
from train.models import build_model

TABLE = "merged LoRA tensors that equal peft's merge_and_unload, bit for bit"
BF16 = torch.bfloat16

Tables = dict[str, dict[str, dict[str, str]]]


# -- PEFT's side ---------------------------------------------------------------------------------------------


def save_base(model: str, dtype: torch.dtype, folder: Path) -> Path:
    """A tiny model as transformers saves it."""
    built: Any = build_model(Config(model=model)).to(dtype)
    built.config.dtype = dtype
    built.save_pretrained(folder)
    return folder


def merge_by_peft(base: Path, saved: list[Path], folder: Path) -> None:
    """The adapters, one after the other."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), saved[0], adapter_name="0")
    for number, path in enumerate(saved[1:], start=1):
        model.load_adapter(path, adapter_name=str(number))
    model.merge_and_unload(adapter_names=[str(number) for number in range(len(saved))]).save_pretrained(folder)


def merge(saved: list[Path], base: Path, output: Path) -> None:
    found = [adapters.open_adapter(str(path)) for path in saved]
    lora.plan(found, adapters.open_base(found[0], str(base))).run(output)


def compare(expected: Path, merged: Path, base: Path) -> tuple[int, int, int]:
    """How many of the expected tensors are equal, how many there are, and how many differ from the base's."""
    theirs, ours, before = weights(expected), weights(merged), weights(base)
    assert ours.keys() == theirs.keys()
    changed = sum(name not in before or not same(theirs[name], before[name]) for name in theirs)
    return sum(same(theirs[name], ours[name]) for name in theirs), len(theirs), changed


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- every kind on every model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """What the layers of an architecture are called."""

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
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIASED = ("gpt2", "qwen2", "gpt_oss")
MOE = ("qwen3_moe", "gpt_oss")


def kinds(model: str) -> dict[str, list[dict[str, Any]]]:
    """Options of the adapters that are merged, by kind."""
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


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {model: save_base(model, BF16, folder / model) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_equals_pefts_own_merge(model: str, bases: dict[str, Path], tmp_path: Path, tables: Tables) -> None:
    failed = []
    for number, (kind, options) in enumerate(kinds(model).items()):
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
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe"])  # gpt_oss keeps norms in fp32 over fp16
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


def test_an_adapter_saved_in_bf16_is_merged_in_fp32_as_peft_loads_it(bases: dict[str, Path], tmp_path: Path) -> None:
    saved = save_adapter(bases["llama"], tmp_path / "adapter", {"target_modules": "all-linear"})
    file = saved / "adapter_model.safetensors"
    save_file({name: t.to(BF16) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    merge_by_peft(bases["llama"], [saved], tmp_path / "peft")
    merge([saved], bases["llama"], tmp_path / "ours")
    equal, total, _ = compare(tmp_path / "peft", tmp_path / "ours", bases["llama"])
    assert equal == total


def test_without_torch_it_says_what_it_takes(fixtures: Path, tmp_path: Path) -> None:
    """In one line and before anything is written."""
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
    """Every dimension of a convolution, a kernel of one, and a square matrix, in a model of the user's own."""

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
    """`nn.MultiheadAttention`, whose output projection PEFT merges twice, as the trained forward pass does."""
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
        assert found.keys() == theirs.keys()
        assert [name for name in theirs if not same(theirs[name], found[name])] == []
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
    """transformers 4 had a linear layer per expert, and so have the adapters of its time."""
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


# -- several adapters as one ---------------------------------------------------------------------------------

COMBINATIONS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cat": {},
    "svd": {},
    "ties": {"density": 0.6},
    "dare_linear": {"density": 0.6, "seed": 5},
    "dare_ties": {"density": 0.6, "seed": 5},
    "magnitude_prune": {"density": 0.6},
    "ties_svd": {"density": 0.6},
    "dare_ties_svd": {"density": 0.6, "seed": 5},
}


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_combinations_are_pefts_own(model: str, bases: dict[str, Path], tmp_path: Path, tables: Tables) -> None:
    from peft import PeftModel

    from ckpt.lora.combine import combine

    targets = {"target_modules": [*MODELS[model].linear, MODELS[model].embedding]}
    saved = [save_adapter(bases[model], tmp_path / f"adapter-{i}", targets, seed=i) for i in range(2)]
    shares = [0.7, -0.4]
    failed = []
    for combination, options in COMBINATIONS.items():
        theirs = PeftModel.from_pretrained(load_base(bases[model]), saved[0], adapter_name="a")
        theirs.load_adapter(saved[1], adapter_name="b")
        if "seed" in options:
            torch.manual_seed(options["seed"])
        density = {"density": options["density"]} if "density" in options else {}
        theirs.add_weighted_adapter(["a", "b"], shares, "c", combination, **density)
        theirs.set_adapter("c")
        theirs.merge_and_unload().save_pretrained(tmp_path / "peft")
        found = [adapters.open_adapter(str(path)) for path in saved]
        base = adapters.open_base(found[0], str(bases[model]))
        one = combine(found, shares, base, combination, options.get("density"), options.get("seed"))
        lora.plan([one], base).run(tmp_path / "ours", overwrite=True)
        equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", bases[model])
        tables[TABLE][f"combination {combination}"][model] = f"{equal}/{total} ({changed})"
        if equal != total or not changed:
            failed.append(f"{combination}: {equal} of {total} equal, {changed} changed")
    assert not failed, "\n".join(failed)


# -- adapters out of sharded runs ----------------------------------------------------------------------------


def gathered(run: Path, config: Config) -> tuple[Any, Path]:
    """The PEFT model with the weights that the live engine gathered, and the truth's file of logits."""
    model: Any = build_model(config).to(torch.float32)
    (file,) = [path for path in (run / "truth").glob("*.safetensors") if "logits" not in path.name]
    truth = {name.removeprefix("weight/"): t for name, t in load_file(file).items() if name.startswith("weight/")}
    assert set(model.load_state_dict(truth, strict=False).unexpected_keys) == set()
    return model.eval(), file.with_name(f"{file.stem}-logits.safetensors")


@pytest.mark.slow
def test_adapter_of_a_sharded_run(tmp_path: Path, tables: Tables) -> None:
    """zero3 and fsdp2: extracted as PEFT saves it, merged onto the checkpoint's own base, loaded, the same logits."""
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
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in expected)
        result = ckpt("merge-lora", run)
        assert result.code == 0, result.err
        assert "the base is the model that the checkpoint itself holds" in result.err
        folder = run.with_name(f"{run.name}-merged")
        merged = model.merge_and_unload()
        theirs, ours = merged.state_dict(), weights(folder)
        equal = sum(same(theirs[name], ours[name]) for name in ours)
        assert equal == len(theirs)
        with torch.no_grad():
            expected_logits = merged(input_ids=stored["input_ids"]).logits
            logits = load_base(folder).eval()(input_ids=stored["input_ids"]).logits
        assert same(expected_logits, logits)
        torch.testing.assert_close(logits, stored["logits"].float(), rtol=2e-2, atol=2e-2)  # live and unmerged
        assert ckpt("verify", "--loads", folder).code == 0
        tables[TABLE][f"out of a {job['strategy']} run"]["llama"] = f"{equal}/{len(theirs)} (14)"


def test_adapter_of_a_bf16_zero3_run_equals_what_peft_saves(fixtures: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    run = tmp_path / "run"
    shutil.copytree(fixtures / "lora-zero3", run)
    result = ckpt("convert", "zero3", "peft", run)
    assert result.code == 0, result.err
    assert "base model's 21 parameters and buffers" in result.err
    (file,) = [path for path in (run / "truth").iterdir() if "logits" not in path.name]
    truth = {name.removeprefix("weight/"): t for name, t in load_file(file).items() if name.startswith("weight/")}
    config = AutoConfig.from_pretrained(run)
    live = get_peft_model(
        AutoModelForCausalLM.from_config(config).to(BF16), LoraConfig.from_pretrained(run), autocast_adapter_dtype=False
    )
    live.load_state_dict(truth)
    expected, found = get_peft_model_state_dict(live), load_file(tmp_path / "run-peft" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert (tmp_path / "run-peft" / "adapter_config.json").read_bytes() == (run / "adapter_config.json").read_bytes()
    base = live.unload()
    base.save_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(base, tmp_path / "run-peft").merge_and_unload().save_pretrained(tmp_path / "peft")
    for where, options in (("own base", []), ("given base", ["--base", str(tmp_path / "base")])):
        assert ckpt("merge-lora", run, "-o", tmp_path / where, *options).code == 0
        equal, total, changed = compare(tmp_path / "peft", tmp_path / where, tmp_path / "base")
        assert (equal, changed) == (total, 14)


def test_an_adapter_that_was_saved_empty_is_taken_from_its_partitions(fixtures: Path, tmp_path: Path) -> None:
    """Saved under ZeRO-3 without gathering, an adapter's file has tensors of shape [0]; the shards beside it do not."""
    run = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(fixtures / "lora-zero3", run)
    shutil.rmtree(run / "truth")
    names = {parse_name(fqn).in_file for fqn, _ in toolkit.open(run).tensors if parse_name(fqn).kind != "base"}
    save_file({name: torch.zeros(0) for name in names}, run / "adapter_model.safetensors", metadata={"format": "pt"})
    found = ckpt("merge-lora", tmp_path / "run")
    assert found.code == 0, found.err
    assert "its partitions are taken instead" in found.err
    assert ckpt("merge-lora", fixtures / "lora-zero3", "-o", tmp_path / "expected").code == 0
    assert ckpt("verify", tmp_path / "expected", tmp_path / "run-merged").code == 0
    shutil.rmtree(run / "global_step2")
    refused = ckpt("merge-lora", tmp_path / "run", "-o", tmp_path / "again")
    assert refused.code == CorruptError.exit_code
    assert "28 of 28 tensors of shape [0]" in refused.err


# -- finding, and refusing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def linear(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    return save_adapter(bases["llama"], folder / "adapter", {"target_modules": ["q_proj", "down_proj"]})


def edited(adapter: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the adapter with another config."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_bare_command_takes_the_newest_adapter_of_the_run(
    linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for step in (2, 10):
        shutil.copytree(linear, run / f"checkpoint-{step}")
    (run / "checkpoint-10" / "tokenizer_config.json").write_text('{"model_max_length": 5}')
    monkeypatch.chdir(run)
    result = ckpt("merge-lora", "--json")
    assert result.code == 0, result.err
    assert "taking the adapter checkpoint-10" in result.err
    assert json.loads(result.out)["destination"] == str(Path("..") / "run-merged") or (tmp_path / "run-merged").is_dir()
    merged = tmp_path / "run-merged"
    assert (merged / "tokenizer_config.json").read_text() == '{"model_max_length": 5}'
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {p.name for p in merged.iterdir()}
    shutil.copytree(linear, run, dirs_exist_ok=True)  # saved at the end of training
    assert "taking the adapter" not in ckpt("merge-lora", "--dry-run").err


def test_the_base_may_be_of_any_format(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    merge([linear], bases["llama"], tmp_path / "from-hf")
    for target in ("full", "dcp"):
        toolkit.plan(toolkit.open(bases["llama"]), target, Layout(world_size=3 if target == "dcp" else None)).run(
            tmp_path / target
        )
        found = ckpt(
            "merge-lora",
            linear,
            "--base",
            tmp_path / target,
            "--config",
            bases["llama"],
            "-o",
            tmp_path / "out",
            "--overwrite",
        )
        assert found.code == 0, found.err
        expected, merged = weights(tmp_path / "from-hf"), weights(tmp_path / "out")
        assert expected.keys() == merged.keys()
        assert all(same(expected[name], merged[name]) for name in expected)


def test_shards_and_little_memory(bases: dict[str, Path], tmp_path: Path) -> None:
    """Experts that a merge computes as one tensor go to many tensors in several files."""
    saved = save_adapter(bases["qwen3_moe"], tmp_path / "adapter", {"target_modules": [], "target_parameters": EXPERTS})
    merge([saved], bases["qwen3_moe"], tmp_path / "one")
    adapter = adapters.open_adapter(str(saved))
    base = adapters.open_base(adapter, None)
    plan = lora.plan([adapter], base, Layout(max_shard_size=3000), Resources(max_memory=1 << 20, workers=2))
    plan.run(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 10
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(same(one[name], many[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "only LoRA adapters"),
        ({"arrow_config": {"top_k": 1}}, "it uses Arrow"),
        ({"use_qalora": True}, "it uses QA-LoRA"),
        ({"alora_invocation_tokens": [1]}, "it uses activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "it uses layer replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "takes part of the base weights"),
    ],
)
def test_what_is_not_merged_is_refused_by_name(
    linear: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    result = ckpt("merge-lora", edited(linear, tmp_path / "adapter", **changes))
    assert result.code == UsageError.exit_code
    assert message in result.err
    assert not (tmp_path / "adapter-merged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": "8"}, "r of the adapter's config is wrong"),
        ({"r": 0}, "r of the adapter's config is wrong"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of the adapter's config"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"use_dora": True}, "do not agree on DoRA"),
    ],
)
def test_a_wrong_config_is_found(linear: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    result = ckpt("merge-lora", edited(linear, tmp_path / "adapter", **changes))
    assert result.code == CorruptError.exit_code
    assert message in result.err


def test_a_rank_that_the_config_does_not_have(linear: Path, tmp_path: Path) -> None:
    result = ckpt("merge-lora", edited(linear, tmp_path / "adapter", r=4))
    assert result.code == LossError.exit_code
    assert "expected: shape [4, " in result.err


@pytest.mark.parametrize("saved", [None, ["lm_head"], ["embed_tokens"]])
def test_an_adapter_of_a_resized_vocabulary_is_refused(tmp_path: Path, saved: list[str] | None) -> None:
    """PEFT saves the embeddings with it; of `modules_to_save` each copy, under names that no base has."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=37, **sizes)).save_pretrained(tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(40)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    result = ckpt("merge-lora", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "out")
    assert result.code == LossError.exit_code
    assert "shape [40, 16], of a vocabulary that was resized before training" in result.err
    assert "resize_token_embeddings" in result.err


def test_another_base_is_refused(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    for other in ("gpt2", "qwen3_moe"):
        result = ckpt("merge-lora", linear, "--base", bases[other], "-o", tmp_path / "out")
        assert result.code == LossError.exit_code
        assert "the adapter does not fit this base" in result.err
    recorded = edited(linear, tmp_path / "adapter", base_model_name_or_path="org/Model-8B")
    missing = ckpt("merge-lora", recorded)
    assert missing.code == NotFoundError.exit_code
    assert "hf download org/Model-8B" in missing.err and "or give the folder of a copy with --base" in missing.err
    cache = tmp_path / "models--org--Model-7B" / "snapshots" / ("0" * 40)
    shutil.copytree(bases["llama"], cache)
    refused = ckpt("merge-lora", recorded, "--base", cache, "-o", tmp_path / "out")
    assert refused.code == UsageError.exit_code
    assert "this is not the base that the adapter was trained on" in refused.err
    assert ckpt("merge-lora", recorded, "--base", cache, "-o", tmp_path / "out", "--accept-base").code == 0
    plain = ckpt("merge-lora", recorded, "--base", bases["llama"], "-o", tmp_path / "plain")
    assert plain.code == 0
    assert "is taken on trust" in plain.err
    quantized = edited(linear, tmp_path / "q", base_model_name_or_path="unsloth/Model-7B-unsloth-bnb-4bit")
    found = ckpt("merge-lora", quantized, "--base", cache, "-o", tmp_path / "quantized")
    assert found.code == 0, found.err
    assert "the same model in full precision" in found.err
    assert "--base unsloth/Model-7B-unsloth-bnb-4bit --dequantize" in found.err
    missing = ckpt("merge-lora", quantized, "-o", tmp_path / "none")
    assert missing.code == NotFoundError.exit_code
    assert "give the full-precision unsloth/Model-7B, or what that was made from, with --base" in missing.err
    other = edited(linear, tmp_path / "o", base_model_name_or_path="unsloth/Model-8B-bnb-4bit")
    assert ckpt("merge-lora", other, "--base", cache, "-o", tmp_path / "p").code == UsageError.exit_code
    same_model = edited(linear, tmp_path / "s", base_model_name_or_path="org/Model-7B-BF16")
    assert "in another precision" in ckpt("merge-lora", same_model, "--base", cache, "-o", tmp_path / "f").err
    other_commit = edited(linear, tmp_path / "r", base_model_name_or_path="org/Model-7B", revision="1" * 40)
    assert ckpt("merge-lora", other_commit, "--base", cache, "-o", tmp_path / "c").code == UsageError.exit_code


def test_a_base_of_another_architecture_is_refused_though_its_shapes_fit(fixtures: Path, tmp_path: Path) -> None:
    """The config beside a run's adapter tells; the names of a llama's and a qwen2's layers are the same."""
    run = Path(shutil.copytree(fixtures / "lora-zero3", tmp_path / "run"))
    assert ckpt("merge-lora", run, "-o", tmp_path / "base").code == 0
    for key, value in (("model_type", "mistral"), ("num_hidden_layers", 3)):
        config = json.loads((fixtures / "lora-zero3" / "config.json").read_text())
        (tmp_path / "base" / "config.json").write_text(json.dumps(config | {key: value}))
        refused = ckpt("merge-lora", run, "--base", tmp_path / "base", "-o", tmp_path / "out")
        assert refused.code == UsageError.exit_code
        assert f"found: {key} {value}" in refused.err
    merge = ("merge-lora", run, "--base", tmp_path / "base", "-o", tmp_path / "out", "--accept-base")
    refused = ckpt(*merge)
    assert refused.code == LossError.exit_code and "9 missing: model.layers.2." in refused.err
    accepted = ckpt(*merge, "--names", "own")
    assert accepted.code == 0, accepted.err


def test_verify_compares_a_runs_adapter_with_the_folder_made_of_it(fixtures: Path, tmp_path: Path) -> None:
    run, saved = fixtures / "lora-zero3", tmp_path / "saved"
    assert ckpt("convert", "zero3", "peft", run, "-o", saved).code == 0
    for pair in ((run, saved), (saved, run)):
        result = ckpt("verify", *pair)
        assert result.code == 0, result.out
        assert "28 tensors" in result.out and "the base model in" in result.out
    tensors = load_file(saved / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: -tensors[name]}, saved / "adapter_model.safetensors")
    changed = ckpt("verify", run, saved)
    assert changed.code == 1 and "1 differ, 27 equal" in changed.out


def test_what_of_a_training_run_is_left_out_is_said(fixtures: Path, tmp_path: Path) -> None:
    for command in (("merge-lora",), ("convert", "zero3", "peft")):
        told = ckpt(*command, fixtures / "lora-zero3", "-o", tmp_path / command[0]).err
        assert "not in the target: optimizer states exp_avg, exp_avg_sq, step (56 tensors, 2.53 kB)" in told
        assert "not in the target: hyperparameters of 1 param group" in told
        assert "not in the target: training state step 2, ds_config" in told
    assert "the base model's 21 parameters and buffers (7.16 kB), which were not trained" in told


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "mxfp4"])
def test_a_quantized_base_is_refused(method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Names, shapes and dtypes of the weights as these libraries store them; the values do not matter."""
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
    assert "this weight of the base is quantized" in result.err
    assert method in result.err
    assert "full-precision" in result.err
    assert "--dequantize" in result.err
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_its_config_or_a_factor(linear: Path, tmp_path: Path, fixtures: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "lora-zero3", run)
    (run / "adapter_config.json").unlink()
    for command in (("convert", "zero3", "peft", run), ("merge-lora", run)):
        result = ckpt(*command)
        assert result.code == NotFoundError.exit_code
        assert "--config" in result.err
    config = tmp_path / "elsewhere"
    config.mkdir()
    shutil.copy(fixtures / "lora-zero3" / "adapter_config.json", config)
    assert ckpt("convert", "zero3", "peft", run, "--config", config).code == 0
    half = tmp_path / "half"
    shutil.copytree(linear, half)
    tensors = load_file(half / "adapter_model.safetensors")
    del tensors[next(name for name in tensors if ".lora_B." in name)]
    save_file(tensors, half / "adapter_model.safetensors", metadata={"format": "pt"})
    result = ckpt("merge-lora", half)
    assert result.code == CorruptError.exit_code
    assert "lacks one of a layer's factors" in result.err


def test_a_trained_parameter_outside_the_adapter_is_no_silent_loss(fixtures: Path) -> None:
    checkpoint = toolkit.open(fixtures / "lora-zero3")
    group = checkpoint.state.param_groups[0]
    frozen = "base_model.model.model.norm.weight"
    assert frozen in {fqn for fqn, role in checkpoint.tensors if role in (WEIGHT, MASTER)}
    object.__setattr__(group, "fqns", (*group.fqns, frozen))
    with pytest.raises(LossError, match="was trained, but is no part of the adapter"):
        toolkit.plan(checkpoint, "peft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter-weights", "1"], "needs one weight for each adapter"),
        (["--adapter-weights", "a,b"], "takes numbers"),
        (["--adapter-weights", "1,1", "--combination", "sum"], "no such combination"),
        (["--adapter-weights", "1,1", "--combination", "ties"], "needs --density"),
        (["--adapter-weights", "1,1", "--combination", "dare_ties", "--density", "0.5"], "give a --seed"),
    ],
)
def test_combinations_need_what_they_need(linear: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = ckpt("merge-lora", linear, linear, "-o", tmp_path / "out", *options)
    assert result.code == UsageError.exit_code
    assert message in result.err


def test_combined_on_the_command_line(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    other = save_adapter(bases["llama"], tmp_path / "other", {"target_modules": ["q_proj", "down_proj"]}, seed=9)
    result = ckpt(
        "merge-lora", linear, other, "--adapter-weights", "0.5,0.5", "--combination", "cat", "-o", tmp_path / "out"
    )
    assert result.code == 0, result.err
    assert "combined by PEFT (cat): 0.5 of" in result.err


# -- names, and loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "in_file"),
    [
        ("base_model.model.a.b.lora_A.default.weight", "lora_A", "base_model.model.a.b.lora_A.weight"),
        ("base_model.model.a.b.lora_B.default.bias", "lora_B.bias", "base_model.model.a.b.lora_B.bias"),
        ("base_model.model.e.lora_embedding_A.default", "lora_embedding_A", "base_model.model.e.lora_embedding_A"),
        (
            "base_model.model.a.lora_magnitude_vector.default.weight",
            "lora_magnitude_vector",
            "base_model.model.a.lora_magnitude_vector",
        ),
        (
            "base_model.model.a.lora_magnitude_vector",
            "lora_magnitude_vector",
            "base_model.model.a.lora_magnitude_vector",
        ),
        ("base_model.model.h.modules_to_save.default.weight", "modules_to_save", "base_model.model.h.weight"),
        ("model.x.lora_A.weight", "lora_A", "base_model.model.model.x.lora_A.weight"),
    ],
)
def test_names_of_an_adapters_tensors(name: str, kind: str, in_file: str) -> None:
    assert (parse_name(name).kind, parse_name(name).in_file) == (kind, in_file)
    assert parse_name(parse_name(name).in_file).in_file == in_file or kind == "modules_to_save"


def test_patterns_match_as_pefts_do() -> None:
    from peft.utils.other import get_pattern_key

    patterns = {"q_proj": 2, r"layers\.1\..*": 3, "mlp.up_proj": 4}
    config = parse_config({"peft_type": "LORA", "r": 8, "rank_pattern": patterns}, Path("adapter_config.json"))
    for key in ("model.layers.0.q_proj", "model.layers.1.k_proj", "x.mlp.up_proj", "xmlp.up_proj", "my_q_proj"):
        assert config.rank_of(key) == patterns.get(get_pattern_key(patterns, key), 8)
    assert adapter_names.CONFIG == "adapter_config.json"


def test_verify_loads_names_what_is_wrong(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = ckpt("verify", "--loads", bases["qwen3_moe"])
    assert (good.code, good.out.splitlines()[-1].endswith("loads")) == (0, True)
    bad = tmp_path / "bad"
    shutil.copytree(bases["qwen3_moe"], bad)
    stored = weights(bad)
    del stored["model.norm.weight"]
    stored |= {"extra": torch.zeros(2), "model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5)}
    save_file(stored, bad / "model.safetensors", metadata={"format": "pt"})
    generation = json.loads((bad / "generation_config.json").read_text())
    (bad / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 10**6}))
    (bad / "tokenizer_config.json").write_text("{}")
    result = ckpt("verify", "--loads", bad, "--json")
    assert result.code == 1
    problems = "\n".join(json.loads(result.out)["problems"])
    for expected in (
        "missing: model.norm.weight",
        "unexpected: extra",
        "mismatched: model.layers.0.self_attn.q_proj.weight has shape [3, 5]",
        "eos_token_id 1000000 is no row of the embedding",
        "tokenizer: ",
    ):
        assert expected in problems
    with monkeypatch.context() as patch:
        find = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
        lacking = ckpt("verify", "--loads", bases["qwen3_moe"])
    assert lacking.code == UsageError.exit_code and "loading a model needs accelerate" in lacking.err
    assert lacking.err.rstrip().endswith("hint: pip install 'transformers>=5' torch accelerate")
    assert ckpt("verify", "--loads", bases["llama"], bad).code == UsageError.exit_code
    assert ckpt("verify", "--loads", tmp_path).code == NotFoundError.exit_code
