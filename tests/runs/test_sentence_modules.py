"""`ckpt/runs/sentence_modules.py`: sentence-transformers runs, and TRL's value head, as Hub folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.building import write_stage3
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}


def bert(folder: Path) -> dict[str, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, max_position_embeddings=12, architectures=["BertModel"])
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    return dict(transformers.BertModel(config).named_parameters())


@pytest.mark.parametrize("inner", ["auto_model", "model"])
def test_a_run_of_sentence_transformers(tmp_path: Path, inner: str) -> None:
    """The model and each trained module have their own folders; placeholders there are replaced."""
    step = tmp_path / "checkpoint-2"
    model = {fqn: tensor.detach() for fqn, tensor in bert(step).items()}
    dense = {"linear.weight": torch.randn(8, 16), "linear.bias": torch.randn(8)}
    names = {f"0.{inner}.{fqn}": t for fqn, t in model.items()} | {f"2.{fqn}": t for fqn, t in dense.items()}
    write_stage3(step / "run", [names], 2)
    (step / "run" / "global_step2").rename(step / "global_step2")
    (step / "latest").write_text("global_step2")
    listed = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Dense", "Dense")]
    modules = [{"idx": int(n), "name": n, "path": path, "type": f"st.{kind}"} for n, path, kind in listed]
    (step / "modules.json").write_text(json.dumps(modules))
    (step / "sentence_bert_config.json").write_text("{}")
    for name in ("1_Pooling", "2_Dense"):
        (step / name).mkdir()
        (step / name / "config.json").write_text(json.dumps({"of": name}))
    save_file({fqn: torch.empty(0) for fqn in dense}, step / "2_Dense" / "model.safetensors")
    report = ckpt("convert", "auto", "hf", step, "-o", tmp_path / "out", "--dtype", "fp32", "--verify")
    assert report.code == 0 and "SentenceTransformer can load this folder" in report.out + report.err, report
    again = ckpt("convert", "hf", "hf", tmp_path / "out", "-o", tmp_path / "again", "--names", "own")
    assert again.code == 0, again
    for out in (tmp_path / "out", tmp_path / "again"):
        found = load_file(out / "model.safetensors"), load_file(out / "2_Dense" / "model.safetensors")
        for written, truth in zip(found, (model, dense), strict=True):
            assert written.keys() == truth.keys()
            assert all(torch.equal(written[fqn], truth[fqn]) for fqn in truth)
        kept = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/config.json")
        assert all((out / name).read_bytes() == (step / name).read_bytes() for name in kept)
    assert ckpt("verify", tmp_path / "out", tmp_path / "again").code == 0


def test_a_value_head_stays_next_to_the_model(tmp_path: Path) -> None:
    """TRL reads `v_head.` from the model's own file; other tensors next to the model are still refused."""
    step = tmp_path / "checkpoint-2"
    model = {fqn: tensor.detach() for fqn, tensor in bert(step).items()}
    for head, code in (("v_head.summary.weight", 0), ("other.weight", 6)):
        names = {f"pretrained_model.{fqn}": t for fqn, t in model.items()} | {head: torch.randn(1, 16)}
        run = write_stage3(tmp_path / head, [names], 2)
        options = ("-o", tmp_path / "out", "--overwrite", "--dtype", "fp32", "--config", step / "config.json")
        report = ckpt("convert", "auto", "hf", run, *options)
        assert report.code == code, report
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*model, "v_head.summary.weight"}


RUN = FIXTURES / "sentence-transformers"
WEIGHTS = ("model.safetensors", "2_Dense/model.safetensors", "3_LayerNorm/model.safetensors")


@pytest.mark.parametrize("format", ["hf", "trainer"])
def test_a_trainer_step_keeps_all_modules(tmp_path: Path, format: str) -> None:
    """The weights equal the final model's files, saved by sentence-transformers, byte for byte."""
    report = ckpt("convert", "auto", format, RUN, "-o", tmp_path)
    assert report.code == 0, report
    assert ("SentenceTransformer can load this folder" in report.out + report.err) == (format == "hf")
    names = {str(file.relative_to(RUN / "final")) for file in (RUN / "final").rglob("*.*") if file.is_file()}
    assert all((tmp_path / name).read_bytes() == (RUN / "final" / name).read_bytes() for name in names)
    if format == "trainer":
        found, given = (torch.load(one / "optimizer.pt") for one in (tmp_path, RUN / "checkpoint-2"))
        assert [one["params"] for one in found["param_groups"]] == [one["params"] for one in given["param_groups"]]
        for number, states in given["state"].items():
            assert all(torch.equal(found["state"][number][name], value) for name, value in states.items())


def test_states_of_modules_have_the_trained_names(tmp_path: Path) -> None:
    """Each weight and state equals the live trainer's."""
    assert ckpt("convert", "auto", "full", RUN, "-o", tmp_path).code == 0
    weights, states = torch.load(tmp_path / "pytorch_model_fsdp.bin"), torch.load(tmp_path / "optimizer.bin")["state"]
    for name, tensor in load_file(RUN / "truth" / "checkpoint-2.safetensors").items():
        role, _, fqn = name.partition("/")
        if role != "embeddings":
            assert torch.equal(weights[fqn] if role == "weight" else states[fqn][role], tensor)


def as_torch(step: Path) -> None:
    for folder in ("2_Dense", "3_LayerNorm"):
        tensors = load_file(step / folder / "model.safetensors")
        torch.save(tensors, step / folder / "pytorch_model.bin")
        (step / folder / "model.safetensors").unlink()


def into_subfolder(step: Path) -> None:
    (step / "0_Transformer").mkdir()
    for name in ("model.safetensors", "config.json"):
        (step / name).rename(step / "0_Transformer" / name)
    listed = json.loads((step / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (step / "modules.json").write_text(json.dumps(listed))


BROKEN: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "torch files": (as_torch, 0, "whole"),
    "module incomplete": (lambda step: (step / "2_Dense" / "model.safetensors").unlink(), 4, "lists it as Dense"),
    "module missing": (lambda step: shutil.rmtree(step / "3_LayerNorm"), 4, "lists it as LayerNorm"),
    "no config": (lambda step: (step / "config.json").unlink(), 4, "config.json: missing, modules.json lists its"),
    "no model": (lambda step: (step / "model.safetensors").unlink(), 4, "model's weights are missing"),
    "no list": (lambda step: (step / "modules.json").unlink(), 4, "no modules.json"),
    "half a list": (lambda step: (step / "modules.json").write_text("[{"), 4, "ends too early"),
    "stray file": (lambda step: shutil.copy(step / WEIGHTS[1], step / "2_Dense" / "other.safetensors"), 4, "not read"),
    "another layout": (into_subfolder, 2, "0_Transformer for the model alone"),
}


@pytest.mark.parametrize("step", ["checkpoint-2", "final"])
@pytest.mark.parametrize("change", BROKEN)
def test_check_names_broken_modules(tmp_path: Path, change: str, step: str) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    act, code, told = BROKEN[change]
    act(run / step)
    report = ckpt("check", run / step)
    assert report.code == code and told in report.out + report.err, report
