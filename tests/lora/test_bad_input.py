"""`ckpt/lora/find.py`, `merge.py`: what does not belong together is refused by name, and nothing is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.adapters import edited, save_adapter
from tests.support.commands import ckpt, snapshot

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def with_tensors(adapter: Path, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    edited(adapter, folder)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def on_hub(base: Path, folder: Path, name: str, commit: str) -> Path:
    """The base as the Hub's cache has it."""
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
    refused([adapter], other, tmp_path / "out", 2, "not the base that the adapter was trained on", "org/second")


def test_another_base_by_its_revision(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """The commit is the digest that PEFT records of a base."""
    adapter = edited(linear, tmp_path / "adapter", base_model_name_or_path="org/first", revision="b" * 40)
    other = on_hub(bases["llama"], tmp_path, "first", "a")
    refused([adapter], other, tmp_path / "out", 2, "not the base that the adapter was trained on", "b" * 40)


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
    refused([adapter], bases["llama"], tmp_path / "out", 6, "expected: shape [4, ", "found: shape [3, ")
    pattern = edited(linear, tmp_path / "pattern", rank_pattern={"q_proj": 5})
    refused([pattern], bases["llama"], tmp_path / "out", 6, "expected: shape [5, ", "q_proj")


@pytest.mark.parametrize("gone", [Q_A, Q_A.replace("lora_A", "lora_B")])
def test_a_factor_of_one_side_is_missing(gone: str, linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = with_tensors(linear, tmp_path / "adapter", lambda t: {k: v for k, v in t.items() if k != gone})
    said = ("the adapter lacks one of a layer's factors", "expected: lora_A and lora_B")
    refused([adapter], bases["llama"], tmp_path / "out", 4, *said)


def test_targets_that_are_not_in_the_model(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.wq"): t for name, t in tensors.items()}

    adapter = with_tensors(linear, tmp_path / "adapter", renamed)
    refused([adapter], bases["llama"], tmp_path / "out", 6, "self_attn.wq", "found: none of this name")


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
