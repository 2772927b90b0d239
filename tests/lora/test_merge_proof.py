"""`ckpt/commands/merge_lora/merge_proof.py`, `ckpt/state/same_model.py`, `ckpt/commands/verify/command.py`: proofs.

A merged model equals its base plus the adapter's update, and nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as package
from tests.support.adapters import edited, merge_by_peft, save_adapter, save_base
from tests.support.commands import ckpt, ckpt_in_order
from tests.support.pages import commands, differences
from tests.support.places import FIXTURES, REPOSITORY

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def by_peft(linear: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "merged"
    merge_by_peft(bases["llama"], [linear], folder)
    return folder


def changed(model: Path, folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    tensors = {key: t for file in model.glob("*.safetensors") for key, t in load_file(file).items()}
    save_file({**tensors, name: change(tensors[name]).contiguous()}, folder / "model.safetensors")
    return folder


def test_what_peft_merged_is_as_the_adapter_says(linear: Path, bases: dict[str, Path], by_peft: Path) -> None:
    outcome = ckpt("verify", bases["llama"], by_peft, "--adapter", linear)
    assert outcome.code == 0, outcome.out
    last = outcome.out.splitlines()[-1]
    assert last.startswith("as the adapter says: 4 tensors that it targets, ") and last.endswith("every bit compared")
    assert "changed the weights of 4 of 4 targets" in outcome.out


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (Q_PROJ, None, "the adapter changes it, but it equals the base"),
        (Q_PROJ, lambda t: t + 1, "differs from the adapter's result: "),
        (NORM, lambda t: t * 2, "the adapter doesn't change it, but it differs from the base: "),
        (NORM, lambda t: t[:-1], "the adapter doesn't change it, but it differs from the base: shape"),
        (NORM, lambda t: t.double(), "the adapter doesn't change it, but it differs from the base: dtype float64"),
    ],
    ids=["not merged", "another value", "another tensor", "shape", "dtype"],
)
def test_one_tensor_that_is_not_so_is_named(
    name: str, change: Any, said: str, linear: Path, bases: dict[str, Path], by_peft: Path, tmp_path: Path
) -> None:
    base = {key: t for file in bases["llama"].glob("*.safetensors") for key, t in load_file(file).items()}
    wrong = changed(by_peft, tmp_path / "wrong", name, change or (lambda _: base[name]))
    outcome = ckpt("verify", bases["llama"], wrong, "--adapter", linear)
    assert outcome.code == 1
    named = [line for line in outcome.out.splitlines() if line.startswith("* ")]
    assert len(named) == 1 and named[0].startswith(f"* {name}: {said}"), outcome.out
    told = json.loads(ckpt("verify", bases["llama"], wrong, "--adapter", linear, "--json").out)
    assert [one["fqn"] for one in told["deviations"]] == [name] and not told["equal"]


def test_a_config_that_is_not_the_bases_is_said(
    linear: Path, bases: dict[str, Path], by_peft: Path, tmp_path: Path
) -> None:
    assert "config.json" not in ckpt("verify", bases["llama"], by_peft, "--adapter", linear).out
    folder = changed(by_peft, tmp_path / "merged", NORM, torch.clone)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_act": "gelu", "rope_parameters": {**config["rope_parameters"], "rope_theta": 5.0}}
    (folder / "config.json").write_text(json.dumps(config))
    outcome = ckpt("verify", bases["llama"], folder, "--adapter", linear)
    assert "note: config.json has hidden_act 'gelu' in the merged model, and 'silu' in the base" in outcome.out
    assert "has rope_parameters.rope_theta 5.0 in the merged model, and 10000.0 in the base" in outcome.out


def test_an_adapter_that_adds_nothing_is_not_said_to_have_changed_tensors(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(linear, empty)
    tensors = load_file(empty / "adapter_model.safetensors")
    zeros = {name: t * 0 if "lora_B" in name else t for name, t in tensors.items()}
    save_file(zeros, empty / "adapter_model.safetensors", metadata={"format": "pt"})
    outcome = ckpt("verify", bases["llama"], bases["llama"], "--adapter", empty)
    *_, before, last = outcome.out.splitlines()
    assert outcome.code == 0 and before == "nothing was changed: every target equals the base"
    assert last.startswith("as the adapter says: ") and "changed" not in last


def test_a_folder_that_is_the_base_is_no_merged_model(linear: Path, bases: dict[str, Path]) -> None:
    report = package.verify_merge(bases["llama"], bases["llama"], linear)
    assert report.exit_code == 1 and len(report.deviations) == 4 and all(one.is_base for one in report.deviations)
    assert report.outcome.startswith("different: 4 of 4 targets (4 equal to the base")


def test_another_rounding_is_told_from_another_adapter(
    linear: Path, bases: dict[str, Path], by_peft: Path, tmp_path: Path
) -> None:
    """Another device adds in another order. Its last bits differ by a small part of the adapter's update."""
    one_bit = changed(by_peft, tmp_path / "bit", Q_PROJ, lambda t: (t.view(torch.int16) ^ 1).view(t.dtype))
    report = package.verify_merge(bases["llama"], one_bit, linear)
    (found,) = report.deviations
    assert found.is_rounded and found.off is not None and 0 < found.off < 0.05, found
    assert "another order of additions or rounding" in str(report)
    other = save_adapter(bases["llama"], tmp_path / "other", {"target_modules": ["q_proj", "down_proj"]}, seed=2)
    report = package.verify_merge(bases["llama"], by_peft, other)
    assert len(report.deviations) == 4 and not any(one.is_rounded or one.is_base for one in report.deviations)
    assert "another order of additions" not in str(report)


def test_a_merge_in_another_dtype_is_compared_in_that(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    for dtype in ("fp32", "fp16"):
        package.merge_lora(linear, tmp_path / dtype, base=bases["llama"], dtype=dtype)
        report = package.verify_merge(bases["llama"], tmp_path / dtype, linear)
        assert report.equal and any(note.startswith("the base is read in float") for note in report.notes)
        wrong = changed(tmp_path / dtype, tmp_path / f"{dtype}-bit", NORM, lambda t: t * (1 + 2**-10))
        assert not package.verify_merge(bases["llama"], wrong, linear).equal


def test_several_adapters_are_merged_in_their_order(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    other = save_adapter(bases["llama"], tmp_path / "other", {"target_modules": ["q_proj", "up_proj"]}, seed=2)
    merge_by_peft(bases["llama"], [linear, other], tmp_path / "merged")
    command = ("verify", bases["llama"], tmp_path / "merged", "--adapter", linear)
    assert ckpt(*command, "--adapter", other).code == 0
    outcome = ckpt(*command)
    assert outcome.code == 1 and "model.layers.0.mlp.up_proj.weight: the adapter doesn't change it" in outcome.out


def test_experts_and_tied_embeddings_are_compared_under_their_names(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapter = save_adapter(bases["qwen3_moe"], tmp_path / "adapter", options)
    merge_by_peft(bases["qwen3_moe"], [adapter], tmp_path / "merged")
    assert package.verify_merge(bases["qwen3_moe"], tmp_path / "merged", adapter).equal
    report = package.verify_merge(bases["qwen3_moe"], bases["qwen3_moe"], adapter)
    assert all(one.is_base for one in report.deviations) and len(report.deviations) > 2


def test_a_base_that_is_not_the_one_that_the_adapter_names_is_said_to_be_another(
    linear: Path, bases: dict[str, Path], by_peft: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--org--other/snapshots" / ("0" * 40)
    cache.parent.mkdir(parents=True)
    cache.symlink_to(bases["llama"])
    named = edited(linear, tmp_path / "named", base_model_name_or_path="org/llama", revision=None)
    snapshot = tmp_path / "models--org--other/snapshots" / ("1" * 40)
    snapshot.mkdir()
    for file in bases["llama"].iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    outcome = ckpt("verify", snapshot, by_peft, "--adapter", named)
    assert outcome.code == 0
    said = "the adapter was trained on another base: it names org/llama, and this is org/other"
    assert f"note: {said}" in outcome.out
    assert "is the same model\n" in ckpt("verify", bases["llama"], by_peft, "--adapter", named).out


def test_a_base_that_the_adapter_does_not_fit_is_refused(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    outcome = ckpt("verify", bases["gpt2"], bases["gpt2"], "--adapter", linear)
    assert outcome.code == 6 and "the adapter does not fit this base" in outcome.err


@pytest.mark.parametrize(
    "options", [("--cast",), ("--run",), ("--only", "weights"), ("--html", "x.html"), ("--tag-a", "x")]
)
def test_options_of_other_comparisons_are_refused(
    options: tuple[str, ...], linear: Path, bases: dict[str, Path]
) -> None:
    outcome = ckpt("verify", bases["llama"], bases["llama"], "--adapter", linear, *options)
    assert outcome.code == 2 and "--adapter needs a base and a merged model" in outcome.err
    assert options[0] in outcome.err


def test_one_folder_alone_is_refused(linear: Path, bases: dict[str, Path]) -> None:
    assert ckpt("verify", bases["llama"], "--adapter", linear).code == 2
    assert ckpt("verify", bases["llama"], bases["llama"], "--expert-layout", "peft").code == 2


def test_a_base_in_fp32_of_a_merge_in_bf16(linear: Path, tmp_path: Path) -> None:
    """The base is rounded before the merge, as `--dtype bf16` does."""
    base = save_base("llama", torch.float32, tmp_path / "base")
    package.merge_lora(linear, tmp_path / "merged", base=base, dtype="bf16")
    assert package.verify_merge(base, tmp_path / "merged", linear).equal


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("Qwen", "outputs"):
        shutil.copytree(FIXTURES / "trl-lora-zero3" / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs/merge-lora.md").read_text()
    shown = [one for one in commands(page) if one.heading == "Did it do anything?"]
    assert len(shown) == 2
    for one in shown:
        done = ckpt_in_order(*one.words[1:])
        assert not differences(one.printed or [], done.out + done.err)
