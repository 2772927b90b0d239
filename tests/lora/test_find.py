"""`ckpt/commands/merge_lora/find.py`: finds the adapter and base, and refuses a mismatch."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as toolkit
from ckpt.adapters.names import parse_name
from ckpt.errors import CorruptError, LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import Layout
from tests.support.adapters import differing, edited, merge, weights
from tests.support.commands import ckpt


def test_an_adapter_that_was_saved_empty_is_taken_from_its_partitions(fixtures: Path, tmp_path: Path) -> None:
    """After a ZeRO-3 save without gathering, the adapter file has tensors of shape [0], but the shards are complete."""
    run = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(fixtures / "lora-zero3", run)
    shutil.rmtree(run / "truth")
    names = {parse_name(fqn).in_file for fqn, _ in toolkit.open(run).tensors if parse_name(fqn).kind != "base"}
    save_file({name: torch.zeros(0) for name in names}, run / "adapter_model.safetensors", metadata={"format": "pt"})
    found = ckpt("merge-lora", tmp_path / "run")
    assert found.code == 0, found.err
    assert "using its partitions instead" in found.err
    assert ckpt("merge-lora", fixtures / "lora-zero3", "-o", tmp_path / "expected").code == 0
    assert ckpt("verify", tmp_path / "expected", tmp_path / "run-merged").code == 0
    shutil.rmtree(run / "global_step2")
    refused = ckpt("merge-lora", tmp_path / "run", "-o", tmp_path / "again")
    assert refused.code == CorruptError.exit_code
    assert "28 of 28 tensors of shape [0]" in refused.err


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
    assert re.search(r"merging \S*checkpoint-10 into ", result.err)
    assert json.loads(result.out)["destination"] == str(Path("..") / "run-merged") or (tmp_path / "run-merged").is_dir()
    merged = tmp_path / "run-merged"
    assert (merged / "tokenizer_config.json").read_text() == '{"model_max_length": 5}'
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {p.name for p in merged.iterdir()}
    shutil.copytree(linear, run, dirs_exist_ok=True)  # saved at the end of training
    assert "checkpoint-10 into " not in ckpt("merge-lora", "--dry-run").err


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
        assert differing(expected, merged) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "POLY"}, "ckpt can't merge this kind of adapter"),
        ({"arrow_config": {"top_k": 1}}, "it uses Arrow"),
        ({"use_qalora": True}, "it uses QA-LoRA"),
        ({"alora_invocation_tokens": [1]}, "it uses activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "it uses layer replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "moves part of the base weights"),
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
        ({"r": "8"}, "r in the adapter config is wrong"),
        ({"r": 0}, "r in the adapter config is wrong"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern in the adapter config"),
        ({"rank_pattern": {"(": 3}}, "not a regular expression"),
        ({"use_dora": True}, "disagree about use_dora"),
    ],
)
def test_a_wrong_config_is_found(linear: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    result = ckpt("merge-lora", edited(linear, tmp_path / "adapter", **changes))
    assert result.code == CorruptError.exit_code
    assert message in result.err


def test_a_rank_that_the_config_does_not_have(linear: Path, tmp_path: Path) -> None:
    result = ckpt("merge-lora", edited(linear, tmp_path / "adapter", r=4))
    assert result.code == CorruptError.exit_code
    assert "expected: rank 4" in result.err and "found: rank 3" in result.err


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
    assert "the adapter was trained on another base" in refused.err
    assert ckpt("merge-lora", recorded, "--base", cache, "-o", tmp_path / "out", "--accept-base").code == 0
    plain = ckpt("merge-lora", recorded, "--base", bases["llama"], "-o", tmp_path / "plain")
    assert plain.code == 0
    assert "assuming" in plain.err
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
    """Layers of llama and qwen2 have equal names. Only the config next to the adapter tells them apart."""
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
    assert "lacks a LoRA factor for a layer" in result.err
