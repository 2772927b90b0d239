"""`ckpt/commands/merge_lora/effect.py`, `ckpt/commands/merge_lora/command.py`: a merge reports its effect per layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as package
from ckpt.commands.merge_lora.effect import Noted, Update
from ckpt.compare import manifest
from ckpt.errors import StorageError
from tests.support.adapters import edited, same, save_adapter, weights
from tests.support.commands import ckpt

Q_PROJ = "model.layers.0.self_attn.q_proj"


def with_factors(adapter: Path, folder: Path, wanted: str, factor: float) -> Path:
    """Copy the adapter and multiply `lora_B` in layers with `wanted` in their names."""
    edited(adapter, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors |= {name: t * factor for name, t in tensors.items() if wanted in name and "lora_B" in name}
    save_file(tensors, file)
    return folder


def merged(adapter: Path, base: Path, folder: Path, *options: Any) -> Any:
    outcome = ckpt("merge-lora", adapter, "--base", base, "-o", folder, *options)
    assert outcome.code == 0, outcome.err
    return outcome


def test_every_target_is_counted(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    outcome = merged(linear, bases["llama"], tmp_path / "out", "--json")
    base, found = weights(bases["llama"]), weights(tmp_path / "out")
    changed = sum(not same(base[name], found[name]) for name in base)
    assert json.loads(outcome.out)["targets"] == {"changed": changed, "zero": 0, "unchanged": []} and changed
    assert f"changed the weights of {changed} of {changed} targets\n" in outcome.err


def test_a_target_whose_factor_is_zero_is_counted_as_such(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = with_factors(linear, tmp_path / "adapter", Q_PROJ, 0.0)
    outcome = merged(adapter, bases["llama"], tmp_path / "out")
    num = len(load_file(linear / "adapter_model.safetensors")) // 2
    said = f"changed the weights of {num - 1} of {num} targets; to 1 nothing was to be added: a factor is zero, or"
    assert said in outcome.err and "not changed" not in outcome.err


def test_a_target_that_is_rounded_away_is_named_and_fp32_keeps_it(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = with_factors(linear, tmp_path / "adapter", Q_PROJ, 1e-9)
    line = f"{Q_PROJ}: not changed, although its factors are not zero: the whole change is rounded away in bfloat16"
    assert line in merged(adapter, bases["llama"], tmp_path / "out").err
    assert line in merged(adapter, bases["llama"], tmp_path / "quiet", "-q").err
    told = json.loads(merged(adapter, bases["llama"], tmp_path / "json", "--json").out)["targets"]
    assert told["unchanged"] == [{"adapter": str(adapter), "target": Q_PROJ}]
    assert "not changed" not in merged(adapter, bases["llama"], tmp_path / "fp32", "--dtype", "fp32").err


def test_an_untrained_adapter_is_said_to_have_changed_nothing(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = with_factors(linear, tmp_path / "adapter", "", 0.0)
    for options in ((), ("-q",)):
        outcome = merged(adapter, bases["llama"], tmp_path / f"out{options}", *options)
        assert "nothing was changed: every target equals the base" in outcome.err


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
        ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []}),
    ],
    ids=["dora", "conv1d", "tokens", "experts"],
)
def test_targets_of_every_kind_are_counted(
    model: str, options: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(bases[model], tmp_path / "adapter", options)
    done = package.merge_lora(adapter, tmp_path / "out", base=bases[model])
    base, found = weights(bases[model]), weights(tmp_path / "out")
    effects = done.effects
    assert effects.num_changed == len(effects.targets) > 0 and not effects.num_zero
    assert all(
        any(not same(base[name], found[name]) for name in base if name.startswith(one.target.rpartition(".")[0]))
        for one in effects.targets
    )
    assert f"; changed the weights of {len(effects.targets)} of" in str(done)


def test_tokens_that_were_not_trained_count_as_nothing_to_add(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}
    adapter = save_adapter(bases["llama"], tmp_path / "adapter", options)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if "trainable_tokens" in name]
    tensors[name] = weights(bases["llama"])["model.embed_tokens.weight"][[1, 3]].to(tensors[name].dtype)
    save_file(tensors, file)
    done = package.merge_lora(adapter, tmp_path / "out", base=bases["llama"])
    assert [one.target for one in done.effects.targets if one.is_nothing] == ["model.embed_tokens"]


@pytest.mark.parametrize("is_other", [False, True])
def test_rows_that_two_adapters_replace_are_the_later_ones_and_it_is_said(
    is_other: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}
    adapters = [save_adapter(bases["llama"], tmp_path / "1", options)]
    later = options | {"trainable_token_indices": [3, 7]} if is_other else options
    adapters.append(save_adapter(bases["llama"], tmp_path / "2", later, seed=2 if is_other else 1))
    done = package.merge_lora(adapters, tmp_path / "out", base=bases["llama"])
    of_tokens = [one for one in done.effects.targets if one.target == "model.embed_tokens"]
    assert [(one.is_changed, one.is_nothing) for one in of_tokens] == [(True, False), (is_other, not is_other)]
    again = "1 trained row" if is_other else "2 trained rows"
    told = f"{again} of model.embed_tokens.weight from {adapters[1]} replace an earlier adapter's"
    assert told in str(done) and "rounded away" not in str(done)
    rows = next(t for name, t in load_file(adapters[1] / "adapter_model.safetensors").items() if "trainable" in name)
    found = weights(tmp_path / "out")["model.embed_tokens.weight"]
    assert same(found[later["trainable_token_indices"]], rows.to(found.dtype))


@pytest.mark.parametrize("number", [0, 1, 7919, -1])
def test_one_value_of_many_is_a_change_and_the_update_behind_it_is_none(number: int) -> None:
    """The first, sampled comparison skips most values of a weight."""
    weight = torch.zeros((300, 700), dtype=torch.bfloat16)
    changed = weight.clone()
    changed.view(-1)[number] = 1
    results: dict[str, Any] = {"nothing": lambda one: one, "one": lambda _: changed, "back": lambda _: weight}
    names = ("nothing", "one", "nothing", "back")
    updates = [Update("adapter", f"{n}{name}", results[name], lambda: False) for n, name in enumerate(names)]
    noted = Noted(1, {"w": lambda: memoryview(b"")})
    noted.updated("w", "bfloat16", weight.clone, updates)
    assert [one.is_changed for one in noted.effects.targets] == [False, True, False, True]


def test_a_merge_that_goes_on_counts_what_was_done_before(
    linear: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(*_: object) -> None:
        raise StorageError("no space on the disk")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(manifest, "make_manifest", disk_is_full)
        package.merge_lora(linear, tmp_path / "out", base=bases["llama"])
    done = package.merge_lora(linear, tmp_path / "out", base=bases["llama"])
    assert done.num_done == done.conversion.plan.moved_bytes
    assert done.effects.num_changed == len(done.effects.targets) > 0
