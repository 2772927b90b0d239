"""`converters/huggingface/peft.py`: adapters from sharded runs match PEFT's save of the live model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ckpt as toolkit
from ckpt.errors import LossError
from ckpt.plan.checkpoint import MASTER, WEIGHT
from tests.support.adapters import BF16, compare, differing
from tests.support.commands import ckpt


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
    assert differing(found, expected) == []
    assert (tmp_path / "run-peft" / "adapter_config.json").read_bytes() == (run / "adapter_config.json").read_bytes()
    base = live.unload()
    base.save_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(base, tmp_path / "run-peft").merge_and_unload().save_pretrained(tmp_path / "peft")
    for where, options in (("own base", []), ("given base", ["--base", str(tmp_path / "base")])):
        assert ckpt("merge-lora", run, "-o", tmp_path / where, *options).code == 0
        equal, total, changed = compare(tmp_path / "peft", tmp_path / where, tmp_path / "base")
        assert (equal, changed) == (total, 14)


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


def test_a_trained_parameter_outside_the_adapter_is_no_silent_loss(fixtures: Path) -> None:
    checkpoint = toolkit.open(fixtures / "lora-zero3")
    group = checkpoint.state.param_groups[0]
    frozen = "base_model.model.model.norm.weight"
    assert frozen in {fqn for fqn, role in checkpoint.tensors if role in (WEIGHT, MASTER)}
    object.__setattr__(group, "fqns", (*group.fqns, frozen))
    with pytest.raises(LossError, match="was trained, but the adapter does not include it"):
        toolkit.plan(checkpoint, "peft")
