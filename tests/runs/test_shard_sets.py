"""`ckpt/containers/weights.py`, `ckpt/commands/check/files.py`: every command judges shard sets in the same way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt import api
from ckpt.commands.check.checking import check
from ckpt.errors import IncompleteError, LossError
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

LOST = IncompleteError.exit_code
COUNT = 3


def write(folder: Path, name: str, numbers: tuple[int, ...], count: int = COUNT) -> Path:
    """Write the shards with these numbers; `name` has the stem and the suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = name.split(".")
    for number in numbers:
        tensors = {f"layers.{number}.weight": torch.full((2, 3), float(number))}
        file = folder / f"{stem}-{number:05}-of-{count:05}.{suffix}"
        save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
    return folder


def commands(place: Path, out: Path) -> list[tuple[str | Path, ...]]:
    return [
        ("check", place),
        ("inspect", place),
        ("hash", place),
        ("verify", place, place),
        ("convert", "auto", "full", place, "-o", out),
        ("convert", "auto", "hf", place, "-o", out, "-q"),
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.bin", "own.safetensors"])
@pytest.mark.parametrize("there", [(1,), (2,), (3,), (1, 3)])
def test_some_shards_without_an_index_are_incomplete_for_every_command(
    name: str, there: tuple[int, ...], tmp_path: Path
) -> None:
    place = write(tmp_path / "model", name, there)
    for command in commands(place, tmp_path / "out"):
        done = ckpt(*command)
        assert done.code == LOST and "the set of shards is not complete" in done.out + done.err, (command, done)
    with pytest.raises(IncompleteError):
        api.open(place)
    assert not check(place).whole and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.bin"])
@pytest.mark.parametrize("count", [1, COUNT])
def test_all_shards_without_an_index_are_whole_and_the_index_is_named(name: str, count: int, tmp_path: Path) -> None:
    """Loaders that go by file names accept these shards; transformers needs the index."""
    place = write(tmp_path / "model", name, tuple(range(1, count + 1)), count)
    for number, command in enumerate(commands(place, tmp_path / "out")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        done = ckpt(*command)
        assert done.code == 0, (command, done)
        told = f"{name}.index.json is missing" if number else f"{name}.index.json: the index is missing"
        assert told in done.out + done.err or "-q" in command, (command, done)
    assert "every part of every tensor is there" not in ckpt("check", place).out
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == count


def test_shards_of_a_variant_are_whole(tmp_path: Path) -> None:
    """`save_pretrained(variant="fp16")` writes `model.safetensors.index.fp16.json`."""
    place = tmp_path / "model"
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, vocab_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(place, variant="fp16", max_shard_size="4KB")
    index = place / "model.safetensors.index.fp16.json"
    assert index.is_file()
    api.prove_names(place)
    for command in commands(place, tmp_path / "out")[:3]:
        done = ckpt(*command)
        assert done.code == 0 and "index" not in done.out + done.err, (command, done)
    index.unlink()
    with pytest.raises(LossError, match="index"):
        api.prove_names(place)
    assert "the index is missing" in ckpt("check", place).out


def test_a_step_of_hf_trainer_without_the_index_is_incomplete(tmp_path: Path) -> None:
    """Trainer raises "Can't find a valid checkpoint" for it; ckpt used to drop its optimizer."""
    source = FIXTURES / "trainer-plain" / "checkpoint-2"
    step = Path(shutil.copytree(source, tmp_path / "run" / "checkpoint-2"))
    weights = load_file(step / "model.safetensors")
    names = sorted(weights)
    for number, own in enumerate((names[:5], names[5:]), 1):
        save_file({name: weights[name] for name in own}, step / f"model-0000{number}-of-00002.safetensors")
    (step / "model.safetensors").unlink()
    places = (step, step.parent)
    for shard, what in (("none", "the shard index is missing"), ("*-00002-of*", "the set of shards is not")):
        for gone in step.glob(shard):
            gone.unlink()
        for command in [one for place in places for one in [*commands(place, tmp_path / "out"), ("resume", place)]]:
            done = ckpt(*command)
            assert done.code == LOST and what in done.out + done.err, (command, done)
