"""`ckpt/commands/merge_lora/combine.py`: combined adapters match PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.commands.merge_lora import find as adapters
from ckpt.commands.merge_lora import merge as lora
from ckpt.errors import UsageError
from tests.support.adapters import MODELS, TABLE, Tables, compare, load_base, same, save_adapter, save_base, weights
from tests.support.commands import ckpt

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

    from ckpt.commands.merge_lora.combine import combine

    targets = {"target_modules": [*MODELS[model].linear, MODELS[model].embedding]}
    saved = [save_adapter(bases[model], tmp_path / f"adapter-{i}", targets, seed=i) for i in range(2)]
    shares = [0.7, -0.4]
    both = PeftModel.from_pretrained(load_base(bases[model]), saved[0], adapter_name="a")
    both.load_adapter(saved[1], adapter_name="b")
    failed = []
    for combination, options in COMBINATIONS.items():
        theirs = copy.deepcopy(both)
        if "seed" in options:
            torch.manual_seed(options["seed"])
        density = {"density": options["density"]} if "density" in options else {}
        theirs.add_weighted_adapter(["a", "b"], shares, "c", combination, **density)
        theirs.set_adapter("c")
        theirs.merge_and_unload().save_pretrained(tmp_path / "peft")
        found = [adapters.open_adapter(str(path)) for path in saved]
        base = adapters.open_base(found[0], str(bases[model]))
        one = combine(found, shares, base, combination, options.get("density"), options.get("seed"))
        lora.plan([one], base, as_peft=True).run(tmp_path / "ours", overwrite=True)
        equal, total, changed = compare(tmp_path / "peft", tmp_path / "ours", bases[model])
        tables[TABLE][f"combination {combination}"][model] = f"{equal}/{total} ({changed})"
        if equal != total or not changed:
            failed.append(f"{combination}: {equal} of {total} equal, {changed} changed")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("combination", ["cat", "linear", "svd"])
def test_an_rslora_adapter_alone_stays_what_it_is(combination: str, tmp_path: Path) -> None:
    """PEFT's own result is too large by a factor of sqrt(rank)."""
    from ckpt.commands.merge_lora.combine import combine

    base = save_base("llama", torch.float32, tmp_path / "base")
    saved = save_adapter(base, tmp_path / "adapter", {"target_modules": MODELS["llama"].linear, "use_rslora": True})
    adapter = adapters.open_adapter(str(saved))
    opened = adapters.open_base(adapter, str(base))
    lora.plan([adapter], opened).run(tmp_path / "plain")
    combined = combine([adapter], [1.0], opened, combination)
    assert combined.config.scaling("model.layers.0.self_attn.q_proj") == 1
    assert any("once more, by the root of its rank, 3" in note for note in combined.notes)
    lora.plan([combined], opened).run(tmp_path / "combined")
    plain, ours, before = (weights(tmp_path / name) for name in ("plain", "combined", "base"))
    changed = [name for name in plain if not same(plain[name], before[name])]
    assert len(changed) == 8
    for name in changed:
        torch.testing.assert_close(ours[name] - before[name], plain[name] - before[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter-weights", "1"], "needs one weight for each adapter"),
        (["--adapter-weights", "a,b"], "takes numbers"),
        (["--adapter-weights", "1,1", "--combination", "sum"], "unknown combination"),
        (["--adapter-weights", "1,1", "--combination", "ties"], "needs --density"),
        (["--adapter-weights", "1,1", "--combination", "dare_ties", "--density", "0.5"], "give a --seed"),
        (["--combination", "linear"], "go with --adapter-weights"),
        (["--density", "0.5"], "go with --adapter-weights"),
        (["--seed", "0"], "go with --adapter-weights"),
    ],
)
def test_combinations_need_what_they_need(linear: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = ckpt("merge-lora", linear, linear, "-o", tmp_path / "out", *options)
    assert result.code == UsageError.exit_code
    assert message in result.err


def test_an_adapter_with_lora_bias_is_not_combined(bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT combines the factors and loses the biases."""
    saved = save_adapter(bases["qwen2"], tmp_path / "adapter", {"target_modules": ["q_proj"], "lora_bias": True})
    result = ckpt("merge-lora", saved, saved, "--adapter-weights", "1,1", "-o", tmp_path / "out")
    assert result.code == UsageError.exit_code
    assert "adapters with trained biases are not combined" in result.err


def test_combined_on_the_command_line(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    other = save_adapter(bases["llama"], tmp_path / "other", {"target_modules": ["q_proj", "down_proj"]}, seed=9)
    result = ckpt(
        "merge-lora", linear, other, "--adapter-weights", "0.5,0.5", "--combination", "cat", "-o", tmp_path / "out"
    )
    assert result.code == 0, result.err
    assert "combined by PEFT (cat): 0.5 of" in result.err


def test_what_peft_warns_of_a_model_without_a_name_is_not_printed(linear: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = ckpt("merge-lora", linear, linear, "--adapter-weights", "0.5,0.5", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert not [one for one in said if issubclass(one.category, UserWarning)] and "Warning" not in done.err
