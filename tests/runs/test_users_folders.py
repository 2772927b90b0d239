"""`ckpt/runs/opening.py`: run folders written by released trainers (fixtures/make_trl.py, make_axolotl.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt as toolkit
from ckpt.plan.checkpoint import WEIGHT
from ckpt.testing import content
from tests.support.commands import ckpt
from tests.support.describing import expected_weights
from tests.support.engines import Truth, raw
from tests.support.places import FIXTURES, REPOSITORY
from tests.support.run_folders import in_the_order_of_steps
from tests.support.stored import stored

#: Fixtures and their formats.
FULL = {"trl-zero3": "zero3", "trl-zero2": "zero2", "trl-fsdp2": "dcp", "axolotl-fsdp2": "dcp"}
LORA = {"trl-lora-zero3": "zero3"}
EVERY = FULL | LORA
#: Axolotl leaves the exported model in the run folder, and `auto` selects it.
EXPORTED = ("axolotl-fsdp2",)
#: Base model for runs without a config.json.
BASES = {"trl-fsdp2": "meta-llama/Llama-3.1-8B"}


def placed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Truth:
    """Make the fixture the working directory, without its truth, and return the truth."""
    shutil.copytree(FIXTURES / name, tmp_path / "here", ignore=shutil.ignore_patterns("truth", "versions.json"))
    monkeypatch.chdir(in_the_order_of_steps(tmp_path / "here"))
    return Truth.load(FIXTURES / name / "truth" / "checkpoint-2.safetensors")


def assert_is_the_truth(path: str, kind: str, truth: Truth) -> None:
    """Assert that every tensor of the format has the live trainer's bits. ZeRO-3 holds only masters."""
    found = toolkit.open(path, kind)
    roles = {role for _, role in found.tensors}
    expected = {key for key in truth.tensors if key[1] in roles and key[0] not in truth.ties}
    assert set(found.tensors) == expected and len(roles) >= 3
    for key, tensor in found.tensors.items():
        if key in found.quantized.methods:  # 8-bit, see the written weights
            continue
        assert content(tensor) == truth.tensors[key], key


def assert_is_pefts_merge(adapter: str, merged: str) -> None:
    """Assert that transformers loads PEFT's own `merge_and_unload` result, and that it differs from the base."""
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
        options = ["--dtype", "fp32"] if dtype == "fp32" else []  # the default is the run's compute dtype
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
    assert ckpt("convert", "auto", "hf", "outputs").code == 2  # ambiguous
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
    """Accelerate 1.13 left rank 0's parts of the adapter in pytorch_model_fsdp.bin: refused, with a working hint."""
    truth = placed("axolotl-lora-fsdp2", tmp_path, monkeypatch)
    assert "format      peft" in ckpt("inspect", "outputs").out, "the final adapter, as of any finished run"
    for words in (["inspect"], ["convert", "full", "full"], ["hash"]):
        refused = ckpt(*words, "outputs", "--tag", "checkpoint-2")
        assert refused.code == 4 and "one rank's parts" in refused.err and "ckpt merge-lora outputs" in refused.err
        assert "--model-only" in refused.err
    resumed = ckpt("resume", "outputs", "--world-size", "3")
    assert resumed.code == 4 and "one rank's parts" in resumed.err, "the adapter alone would lose the optimizer"
    for words, place in (
        (["outputs/gpt-oss-lora/checkpoint-2", "--world-size", "3"], "outputs/gpt-oss-lora/checkpoint-2"),
        (["outputs", "--tag", "checkpoint-2"], "outputs/gpt-oss-lora/checkpoint-2"),
        (["outputs/gpt-oss-lora"], "outputs/gpt-oss-lora"),
    ):
        hinted = ckpt("resume", *words, "--model-only")
        assert hinted.code == 0 and hinted.out.strip() == place, hinted.err
        assert "is skipped, it cannot be read: this file has only one rank's parts" in hinted.err
        assert "holds no optimizer: its states are reset" in hinted.err
    elsewhere = ckpt("convert", "fsdp", "hf", "outputs")
    assert elsewhere.code == 3 and "hint: this looks like full or peft" in elsewhere.err
    checked = ckpt("check", "outputs")
    assert checked.code == 4 and "unknown" not in checked.out
    assert "gpt-oss-lora: whole (peft, " in checked.out
    assert "checkpoint-2: incomplete (usable as peft, without an optimizer, step 2, " in checked.out
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


def test_the_final_model_is_checked_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed("axolotl-lora-fsdp2", tmp_path, monkeypatch)
    Path("outputs/gpt-oss-lora/adapter_model.safetensors").write_bytes(b"")
    checked = ckpt("check", "outputs")
    assert "gpt-oss-lora: incomplete (not readable" in checked.out, checked.out


WRAPPER = "._checkpoint_wrapped_module"


def test_axolotls_adapter_of_wrapped_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With activation checkpointing the final adapter has the wrappers' names, and PEFT loads none of its tensors."""
    truth = placed("axolotl-lora-fsdp2-ac", tmp_path, monkeypatch)
    final, step = Path("outputs/gpt-oss-lora-ac"), Path("outputs/gpt-oss-lora-ac/checkpoint-2")
    trained = {
        fqn.replace(".default", ""): value
        for (fqn, role), value in truth.tensors.items()
        if role == WEIGHT and "lora_" in fqn
    }
    assert stored(step) == trained and all(WRAPPER in fqn for fqn in stored(final))
    for folder in (final, step):
        report = ckpt("merge-lora", str(folder), "-o", f"merged-{folder.name}")
        assert report.code == 0, report.err
        assert (
            f"16 names contain wrapper prefixes, for example base_model.model.model.layers.0{WRAPPER}" in report.err
        ) == (folder == final)
        assert_is_pefts_merge(str(step), f"merged-{folder.name}")
    assert stored(Path("merged-gpt-oss-lora-ac")) == stored(Path("merged-checkpoint-2"))
    same = ckpt("verify", str(final), str(step), "--from-a", "peft", "--from-b", "peft")
    assert same.code == 0 and "equal: 16 tensors" in same.out
    assert ckpt("hash", str(final), "--format", "peft").out == ckpt("hash", str(step), "--format", "peft").out
    pushed = ckpt("push", str(final), "--repo-id", "me/adapter")
    assert pushed.code == 6 and "PEFT would not load this adapter" in pushed.err, pushed.err
    assert ckpt("convert", "peft", "peft", str(final), "-o", "anew").code == 0
    toolkit.api.prove_names(Path("anew"))
    assert stored(Path("anew")) == trained


@pytest.mark.parametrize("wrapper", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "{}"])
def test_wrappers_of_an_adapter_are_no_part_of_its_names(
    wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed("axolotl-lora-fsdp2-ac", tmp_path, monkeypatch)
    file = Path("outputs/gpt-oss-lora-ac/adapter_model.safetensors")
    tensors = {wrapper.format(n.replace(WRAPPER, "._fsdp_wrapped_module")): t for n, t in load_file(file).items()}
    save_file(tensors, file)
    assert ckpt("merge-lora", "outputs", "-o", "merged").code == 0
    assert_is_pefts_merge("outputs/gpt-oss-lora-ac/checkpoint-2", "merged")
    (name, *_) = tensors
    save_file({**tensors, name.replace("._fsdp_wrapped_module", ""): 2 * tensors[name]}, file)
    refused = ckpt("merge-lora", "outputs", "-o", "again")
    assert refused.code == 4 and "two tensors have the same name without their wrappers" in refused.err


def test_where_the_final_adapter_does_not_fit_a_step_that_does_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed("axolotl-lora-fsdp2-ac", tmp_path, monkeypatch)
    file = Path("outputs/gpt-oss-lora-ac/adapter_model.safetensors")
    save_file({name.replace(WRAPPER, "._wrapped_by_another"): t for name, t in load_file(file).items()}, file)
    refused = ckpt("merge-lora", "outputs")
    assert refused.code == 6 and "the adapter does not fit this base" in refused.err
    assert (
        "hint: the adapter of checkpoint-2 in this run fits: ckpt merge-lora outputs/gpt-oss-lora-ac/checkpoint-2"
        in (refused.err)
    )
    assert ckpt("merge-lora", "outputs/gpt-oss-lora-ac/checkpoint-2").code == 0


YAML = REPOSITORY / "examples/axolotl"


def test_axolotls_yaml_stands_for_the_run_folder_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed("axolotl-lora-fsdp2-ac", tmp_path, monkeypatch)
    shutil.copytree(FIXTURES / "axolotl-fsdp2/outputs", "outputs", dirs_exist_ok=True)
    lora, full = YAML / "gpt-oss-20b-lora-fsdp2-ac.yaml", YAML / "gpt-oss-20b-fft-fsdp2.yaml"
    for words, by_hand in (
        (["merge-lora", str(lora)], ["merge-lora", "outputs/gpt-oss-lora-ac", "-o", "by-hand"]),
        (["convert", "fsdp", "hf", str(full)], ["convert", "fsdp", "hf", "outputs/gpt-oss-out", "-o", "by-hand-2"]),
    ):
        report = ckpt(*words)
        assert report.code == 0 and f"note: using the run folder in {words[-1]}: ./outputs/" in report.err
        assert ckpt(*by_hand).code == 0
        assert stored(Path(report.out.strip())) == stored(Path(by_hand[-1]))
    assert (
        ckpt("resume", str(full), "--world-size", "2", "-q").out
        == ckpt("resume", "outputs/gpt-oss-out", "--world-size", "2", "-q").out
    )


def test_the_base_of_axolotls_yaml_has_the_config_that_a_stopped_run_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed("axolotl-fsdp2", tmp_path, monkeypatch)
    run = Path("outputs/gpt-oss-out")
    for name in ("config.json", "model.safetensors"):
        (run / name).unlink()
    words = ["convert", "fsdp", "hf", str(YAML / "gpt-oss-20b-fft-fsdp2.yaml")]
    assert ckpt(*words, "-o", "without").code == 0 and not Path("without/config.json").exists()
    shutil.copytree(FIXTURES / "axolotl-lora-fsdp2/openai", "openai")
    assert ckpt(*words, "-o", "with").code == 0
    assert json.loads(Path("with/config.json").read_text())["model_type"] == "gpt_oss"
