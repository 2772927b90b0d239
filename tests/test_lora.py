"""Merged LoRA adapters against PEFT's own merge, bit for bit; adapters out of sharded runs; what is refused."""

from __future__ import annotations

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

from ckpt import adapters, lora
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


def load_base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")


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


def merge_by_peft(base: Path, saved: list[Path], folder: Path) -> None:
    """The adapters, one after the other."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), saved[0], adapter_name="0")
    for number, path in enumerate(saved[1:], start=1):
        model.load_adapter(path, adapter_name=str(number))
    model.merge_and_unload(adapter_names=[str(number) for number in range(len(saved))]).save_pretrained(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


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
        "trained tokens": [{"target_modules": [first], "trainable_token_indices": {n.embedding: [1, 4, 7]}}],
        "layers_to_transform": [{"target_modules": n.linear, "layers_to_transform": [1]}],
        "exclude_modules": [{"target_modules": n.linear, "exclude_modules": rf".*1\..*{last}"}],
        "two in turn": [{"target_modules": n.linear}, {"target_modules": [last], "use_rslora": True}],
    }
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

    from ckpt.lora_combine import combine

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
