"""Run folders that the released trainers left (fixtures/make_trl.py, make_axolotl.py), against the live trainers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt as toolkit
from ckpt.plan.checkpoint import WEIGHT
from ckpt.testing import content
from tests.support.commands import ckpt
from tests.support.describing import expected_weights
from tests.support.engines import REPOSITORY, Truth, raw
from tests.support.stored import stored

FIXTURES = REPOSITORY / "fixtures"
#: The fixture, and what its folder is read as.
FULL = {"trl-zero3": "zero3", "trl-zero2": "zero2", "trl-fsdp2": "dcp", "axolotl-fsdp2": "dcp"}
LORA = {"trl-lora-zero3": "zero3"}
EVERY = FULL | LORA
#: Axolotl leaves the exported model in the run folder, which is what `auto` takes.
EXPORTED = ("axolotl-fsdp2",)
#: Where a run has no config.json, the model that it was started with.
BASES = {"trl-fsdp2": "meta-llama/Llama-3.1-8B"}


def placed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Truth:
    """The fixture as the working directory, without its truth, which is returned."""
    shutil.copytree(FIXTURES / name, tmp_path / "here", ignore=shutil.ignore_patterns("truth", "versions.json"))
    monkeypatch.chdir(tmp_path / "here")
    return Truth.load(FIXTURES / name / "truth" / "checkpoint-2.safetensors")


def assert_is_the_truth(path: str, kind: str, truth: Truth) -> None:
    """Every tensor that the format holds is there, with the live trainer's bits; ZeRO-3 holds masters alone."""
    found = toolkit.open(path, kind)
    roles = {role for _, role in found.tensors}
    expected = {key for key in truth.tensors if key[1] in roles and key[0] not in truth.ties}
    assert set(found.tensors) == expected and len(roles) >= 3
    for key, tensor in found.tensors.items():
        if key in found.quantized:  # of 8 bits, see what is written of them
            continue
        assert content(tensor) == truth.tensors[key], key


def assert_is_pefts_merge(adapter: str, merged: str) -> None:
    """transformers loads what PEFT's own `merge_and_unload` makes, which differs from the base."""
    base = json.loads(Path(adapter, "adapter_config.json").read_text())["base_model_name_or_path"]
    before = {fqn: raw(v) for fqn, v in AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict().items()}
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    expected = {fqn: raw(value) for fqn, value in wrapped.merge_and_unload().state_dict().items()}
    model, info = AutoModelForCausalLM.from_pretrained(merged, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert {fqn: raw(value) for fqn, value in model.state_dict().items()} == expected
    assert expected != before
    assert AutoTokenizer.from_pretrained(merged).chat_template


@pytest.mark.parametrize(("name", "kind"), EVERY.items())
def test_found_from_outputs_and_equal_to_the_live_trainer(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = placed(name, tmp_path, monkeypatch)
    asked = kind if name in EXPORTED else "auto"
    report = ckpt("inspect", "outputs", "--format", asked)
    assert report.code == 0 and kind in report.out and "checkpoint-2" in report.out, report.err
    assert_is_the_truth("outputs", asked, truth)


@pytest.mark.parametrize(("name", "kind"), EVERY.items())
def test_resharded_with_its_optimizer(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = placed(name, tmp_path, monkeypatch)
    words = ["convert", kind, kind, "outputs", "--world-size", "3", "-o", "outputs-3/checkpoint-2"]
    if name == "axolotl-fsdp2":
        refused = ckpt(*words)
        assert refused.code == 6 and "--optimizer-dtype fp32" in refused.err
        words += ["--optimizer-dtype", "fp32"]
    report = ckpt(*words)
    assert report.code == 0, report.err
    assert_is_the_truth("outputs-3", kind, truth)


@pytest.mark.parametrize("name", FULL)
def test_a_hub_folder_that_transformers_loads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = placed(name, tmp_path, monkeypatch)
    config = ["--config", BASES[name]] if name in BASES else []
    for dtype in ("bf16", "fp32"):
        options = ["--dtype", "fp32"] if dtype == "fp32" else []  # the other is what the run computed in
        report = ckpt("convert", FULL[name], "hf", "outputs", "-o", dtype, *config, *options)
        assert report.code == 0, report.err
        model, info = AutoModelForCausalLM.from_pretrained(dtype, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        expected = expected_weights(truth, dtype == "fp32")
        assert model.state_dict().keys() == expected.keys()
        for fqn, parameter in model.state_dict().items():
            kept = expected[fqn]
            if dtype == "bf16" and kept[0] == "float32":  # FSDP's own weights
                kept = raw(torch.frombuffer(bytearray(kept[2]), dtype=torch.float32).reshape(kept[1]).bfloat16())
            assert raw(parameter) == kept, fqn
    templates = {path.read_text() for path in Path().rglob("chat_template.jinja")}
    assert templates == {AutoTokenizer.from_pretrained("bf16").chat_template}


@pytest.mark.parametrize("name", LORA)
def test_an_adapter_taken_out_and_merged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = placed(name, tmp_path, monkeypatch)
    assert ckpt("convert", "auto", "hf", "outputs").code == 2  # which of the two is meant?
    for command in (
        ["merge-lora", "outputs", "-o", "merged"],
        ["convert", LORA[name], "peft", "outputs", "-o", "peft"],
    ):
        report = ckpt(*command)
        assert report.code == 0, report.err
    trained = {fqn.replace(".default", ""): value for (fqn, role), value in truth.tensors.items() if role == WEIGHT}
    adapter = stored(Path("peft"))
    assert adapter and all(value == trained[fqn] for fqn, value in adapter.items())
    assert adapter.keys() == {fqn for fqn in trained if "lora_" in fqn}
    assert_is_pefts_merge("peft", "merged")


def test_axolotls_lora_under_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate 1.13 left rank 0's parts of the adapter in pytorch_model_fsdp.bin: refused, with what works."""
    truth = placed("axolotl-lora-fsdp2", tmp_path, monkeypatch)
    assert "format      peft" in ckpt("inspect", "outputs").out, "the final adapter, as of any finished run"
    refused = ckpt("inspect", "outputs", "--tag", "checkpoint-2")
    assert refused.code == 3 and "one rank's parts" in refused.err and "ckpt merge-lora outputs" in refused.err
    assert ckpt("resume", "outputs", "--world-size", "3").code == 3, "the adapter alone would lose the optimizer"
    for folder in ("outputs/gpt-oss-lora", "outputs/gpt-oss-lora/checkpoint-2"):
        saved = stored(Path(folder))
        assert saved == {
            fqn.replace(".default", ""): value
            for (fqn, role), value in truth.tensors.items()
            if role == WEIGHT and "lora_" in fqn
        }
    report = ckpt("merge-lora", "outputs", "-o", "merged")
    assert report.code == 0, report.err
    assert_is_pefts_merge("outputs/gpt-oss-lora", "merged")
