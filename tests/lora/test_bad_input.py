"""`ckpt/commands/merge_lora/find.py`, `merge.py`, `ckpt/adapters/targets.py`: a mismatch is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.adapters.config import read_config
from tests.support.adapters import edited, load_base, merge_by_peft, save_adapter, weights
from tests.support.commands import ckpt, snapshot

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def with_tensors(adapter: Path, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    edited(adapter, folder)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def on_hub(base: Path, folder: Path, name: str, commit: str) -> Path:
    """Copy the base into the layout of the Hub's cache."""
    place = folder / f"models--org--{name}" / "snapshots" / (commit * 40)
    shutil.copytree(base, place)
    return place


def refused(adapters: list[Path], base: Path, out: Path, code: int, *said: str) -> None:
    before = [snapshot(one) for one in (*adapters, base)]
    outcome = ckpt("merge-lora", *adapters, "--base", base, "-o", out)
    assert outcome.code == code, outcome.err
    assert all(words in outcome.err for words in said), outcome.err
    assert not out.exists() and [snapshot(one) for one in (*adapters, base)] == before


def test_another_base_by_its_name(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter", base_model_name_or_path="org/first")
    other = on_hub(bases["llama"], tmp_path, "second", "a")
    refused([adapter], other, tmp_path / "out", 2, "the adapter was trained on another base", "org/second")


def test_another_base_by_its_revision(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """The adapter's `revision` is the commit of its base."""
    adapter = edited(linear, tmp_path / "adapter", base_model_name_or_path="org/first", revision="b" * 40)
    other = on_hub(bases["llama"], tmp_path, "first", "a")
    refused([adapter], other, tmp_path / "out", 2, "the adapter was trained on another base", "b" * 40)


def test_another_base_by_its_shapes(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter", base_model_name_or_path=None)
    file = tmp_path / "narrow"
    shutil.copytree(bases["llama"], file)
    tensors = load_file(file / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(
        {**tensors, name: tensors[name][:, :-1].contiguous()}, file / "model.safetensors", metadata={"format": "pt"}
    )
    refused([adapter], file, tmp_path / "out", 6, "the adapter does not fit this base", "q_proj.lora_A")


def test_a_base_of_another_architecture(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter", base_model_name_or_path=None)
    refused([adapter], bases["gpt2"], tmp_path / "out", 6, "the adapter does not fit this base")


def test_a_rank_that_is_not_the_configs(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter", r=4)
    refused([adapter], bases["llama"], tmp_path / "out", 4, "expected: rank 4", "found: rank 3")
    pattern = edited(linear, tmp_path / "pattern", rank_pattern={"q_proj": 5})
    refused([pattern], bases["llama"], tmp_path / "out", 4, "expected: rank 5", "q_proj")


@pytest.mark.parametrize("gone", [Q_A, Q_A.replace("lora_A", "lora_B")])
def test_a_factor_of_one_side_is_missing(gone: str, linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = with_tensors(linear, tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if k != gone})
    said = ("the adapter lacks a LoRA factor for a layer", "expected: lora_A and lora_B")
    refused([adapter], bases["llama"], tmp_path / "out", 4, *said)


def test_the_config_is_missing(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter")
    (adapter / "adapter_config.json").unlink()
    refused([adapter], bases["llama"], tmp_path / "out", 3, "there is no adapter_config.json", "with --config")
    factors = {name: 0 * tensor for name, tensor in weights(adapter).items()}
    torch.save(factors, adapter / "adapter_model.bin")  # PEFT reads the other file
    given = ("--base", bases["llama"], "--config", linear)
    assert ckpt("merge-lora", adapter, *given, "-o", tmp_path / "out").code == 0
    assert ckpt("merge-lora", linear, *given, "-o", tmp_path / "expected").code == 0
    ours, expected = weights(tmp_path / "out"), weights(tmp_path / "expected")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_targets_that_are_not_in_the_model(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.wq"): t for name, t in tensors.items()}

    adapter = with_tensors(linear, tmp_path / "adapter", renamed)
    refused([adapter], bases["llama"], tmp_path / "out", 6, "self_attn.wq", "found: none of this name")


def test_both_factors_of_a_layer_are_missing(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT merges the other layers and warns."""
    layer = "model.layers.0.self_attn.q_proj"
    adapter = with_tensors(
        linear, tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if f".{layer}." not in k}
    )
    done = ckpt("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out")
    assert done.code == 0 and f"no factors of 1 layer ({layer}), although target_modules names them" in done.err
    merge_by_peft(bases["llama"], [adapter], tmp_path / "peft")
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "peft")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["down_proj"]}, "does not name 2 layers"),
        ({"layers_to_transform": [1]}, "does not name 2 layers"),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, "does not name 2 layers"),
        ({"exclude_modules": ["q_proj"]}, "does not name 2 layers"),
        ({"target_modules": r"model\.layers\.0\..*(q|down)_proj"}, "does not name 2 layers"),
        ({"target_modules": ["down_proj", "q_proj", "o_proj"]}, "no factors of 2 layers"),
        ({"layers_to_transform": []}, ""),
        ({"target_modules": r".*\.(q|down)_proj"}, ""),
    ],
)
def test_a_config_that_names_other_layers_is_said_to(
    changes: dict[str, Any], said: str, linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = edited(linear, tmp_path / "adapter", **changes)
    done = ckpt("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out", "--dry-run")
    assert done.code == 0, done.err
    assert said in done.out if said else "target_modules" not in done.out


def test_a_module_that_was_trained_as_a_whole_is_missing(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    saved = save_adapter(bases["llama"], tmp_path / "saved", options)
    adapter = with_tensors(saved, tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if "lm_head" not in k})
    refused([adapter], bases["llama"], tmp_path / "out", 4, "lm_head.weight", "modules_to_save has lm_head")


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig"])
def test_a_module_that_was_trained_as_a_whole_is_missing_in_one_layer(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    import peft

    saved, config = tmp_path / "saved", getattr(peft, kind)
    options = {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}
    peft.get_peft_model(load_base(bases["llama"]), config(**options)).save_pretrained(saved)
    merge = ("merge-lora", "--base", bases["llama"], "--dry-run", "-o", tmp_path / "out")
    assert ckpt(*merge, saved).code == 0
    missing = "layers.1.input_layernorm"
    adapter = with_tensors(saved, tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if missing not in k})
    refused([adapter], bases["llama"], tmp_path / "out", 4, missing, "modules_to_save has input_layernorm")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "*.q_proj"},
        {"exclude_modules": "("},
        {"layers_to_transform": [1], "layers_pattern": ["("]},
    ],
)
def test_a_config_whose_layers_peft_cannot_find(
    changes: dict[str, Any], linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = edited(linear, tmp_path / "adapter", **changes)
    refused([adapter], bases["llama"], tmp_path / "out", 4, "can't resolve the layer names")


def test_two_adapters_with_copies_that_they_change_are_named_as_such(bases: dict[str, Path], tmp_path: Path) -> None:
    """Both orders are wrong, so the message doesn't suggest another order."""
    options = {"target_modules": ["embed_tokens"]}
    both = [save_adapter(bases["llama"], tmp_path / name, options) for name in ("first", "second")]
    refused(both, bases["llama"], tmp_path / "out", 2, "two adapters contain their own copy")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.18.0.dev0", (0, 18, 0)),
        ("0.18.1", (0, 18, 1)),
        ("0.18.1.dev0@3b2c", None),
        ("0.19.1.dev0", None),
        ("0.19.1", (0, 19, 1)),
        ("0.19.2.dev0@3b2c", (0, 19, 2)),
        ("0.21.0rc1", (0, 21, 0)),
        ("main", None),
    ],
)
def test_a_version_between_two_releases_is_taken_where_these_do_the_same(
    version: str, release: tuple[int, ...] | None, linear: Path
) -> None:
    config = read_config(linear / "adapter_config.json")
    assert replace(config, raw={**config.raw, "peft_version": version}).peft_release == release


def test_a_token_that_the_base_does_not_have(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}
    saved = save_adapter(bases["llama"], tmp_path / "saved", options)
    adapter = edited(saved, tmp_path / "adapter", trainable_token_indices=[1, 9999])
    refused([adapter], bases["llama"], tmp_path / "out", 6, "expected: tokens below", "found: token 9999")


def test_two_adapters_of_different_bases(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    first = edited(linear, tmp_path / "first", base_model_name_or_path="org/one-bf16")
    same = edited(linear, tmp_path / "same", base_model_name_or_path="org/one")
    other = edited(linear, tmp_path / "other", base_model_name_or_path="org/two")
    said = ("these adapters were trained on different bases", "found: org/two", "--accept-base")
    refused([first, other], bases["llama"], tmp_path / "out", 2, *said)
    refused([first, same, other], bases["llama"], tmp_path / "out", 2, *said)
    for number, options in enumerate(([first, same], [first, other, "--accept-base"])):
        out = tmp_path / f"out{number}"
        assert ckpt("merge-lora", *options, "--base", bases["llama"], "-o", out).code == 0


def test_adapters_of_models_of_two_shapes(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    other = save_adapter(bases["gpt2"], tmp_path / "other", {"target_modules": ["c_attn"]})
    unnamed = edited(other, tmp_path / "unnamed", base_model_name_or_path=None)
    refused([linear, unnamed], bases["llama"], tmp_path / "out", 6, "the adapter does not fit this base")
