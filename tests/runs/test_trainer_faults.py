"""One fault in a trainer's folder: no command calls the folder whole, loads it or resumes from it in silence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from tests.support.commands import Result, ckpt
from tests.support.model_files import rewriting
from tests.support.sampling import sample

WHOLE = "every part of every tensor"
LAST, FABRIC, COMPOSER = "checkpoints/last.ckpt", "fabric/step=4.ckpt", "ep2-ba4-rank0.pt"


@pytest.fixture
def copied(fixtures: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        shutil.copytree(fixtures / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("truth"))
        return tmp_path / name

    return copy


def change(file: Path, act: Callable[[Any], object]) -> None:
    """Change a file with its own library."""
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        act(content)
        file.write_text(json.dumps(content))
    elif file.suffix == ".safetensors":
        tensors = load_file(file)
        act(tensors)
        save_file(tensors, file, {"format": "pt"})
    elif file.name == ".metadata":
        metadata = pickle.loads(file.read_bytes())
        act(metadata)
        file.write_bytes(pickle.dumps(metadata))
    else:
        with rewriting(file) as root:
            act(root)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def said(*args: str | Path) -> Result:
    done = ckpt(*args)
    return Result(done.code, " ".join(done.out.split()), " ".join(done.err.split()))


@pytest.mark.parametrize(
    ("fixture", "file", "weights", "name"),
    [
        ("lightning-plain", LAST, "state_dict", "model.1.weight"),
        ("lightning-plain", FABRIC, "model", "1.weight"),
        ("timm", "last.pth.tar", "state_dict", "1.weight"),
    ],
)
def test_optimizer_proves_a_deleted_weight(
    copied: Callable[[str], Path], fixture: str, file: str, weights: str, name: str
) -> None:
    path = copied(fixture) / file
    change(path, lambda root: root[weights].pop(name))
    checked = said("check", path.parent)
    assert checked.code == 4 and "expected 4 trained parameters, found 3 tensors" in checked.out
    for command in (["resume"], ["inspect"], ["hash"]):
        assert ckpt(*command, path).code == 4
    change(path, lambda root: root.update(more={"scale": torch.ones(())}))  # the optimizer may train it
    checked = said("check", path)
    assert checked.code == 0 and "left out the optimizer states" in checked.out and WHOLE not in checked.out


def test_a_file_with_unmapped_states_is_resumed_as_it_is(copied: Callable[[str], Path]) -> None:
    path = copied("lightning-plain") / FABRIC
    change(path, lambda root: root["model"].update({"0.weight": torch.ones(8, 9), "1.weight": torch.ones(9, 8)}))
    checked, resumed = said("check", path.parent), said("resume", path.parent)
    assert checked.code == 0 and "left out the optimizer states" in checked.out and WHOLE not in checked.out
    assert (resumed.code, resumed.out) == (0, str(path)) and "left out the optimizer states" in resumed.err
    change(path, lambda root: root.pop("optimizer"))
    for place in (path, path.parent):
        refused = said("resume", place)
        assert refused.code == 6 and "has an optimizer" in refused.err


@pytest.mark.parametrize(
    ("fixture", "file", "states"),
    [
        ("composer", COMPOSER, ("state", "optimizers", "AdamW", "state", "layers.0.weight")),
        ("lightning-plain", LAST, ("optimizer_states", 0, "state", 0)),
        ("timm", "last.pth.tar", ("optimizer", "state", 0)),
        ("trainer-plain", "checkpoint-2/optimizer.pt", ("state", 0)),
    ],
)
@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_a_parameter_without_one_state(
    copied: Callable[[str], Path], fixture: str, file: str, states: tuple[Any, ...], state: str
) -> None:
    path = copied(fixture) / file

    def drop(root: Any) -> None:
        for key in states:
            root = root[key]
        del root[state]

    change(path, drop)
    place = path if fixture != "trainer-plain" else path.parent
    checked = said("check", place)
    assert checked.code == 4 and f"expected {state}" in checked.out, checked.out
    assert ckpt("resume", place).code == 4


def drop_from_metadata(ending: str) -> Callable[[Any], None]:
    def drop(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.endswith(ending)]:
            del metadata.state_dict_metadata[key]
            for index in [index for index in metadata.storage_data if index.fqn == key]:
                del metadata.storage_data[index]

    return drop


def test_states_missing_from_every_parameter_of_adam(copied: Callable[[str], Path]) -> None:
    step = copied("lightning") / "checkpoints" / "last.ckpt"
    change(step / ".metadata", drop_from_metadata(".exp_avg"))
    checked = said("check", step)
    assert checked.code == 4 and "lacks a state of torch's Adam" in checked.out and ckpt("resume", step).code == 4


def test_a_group_of_one_parameter_is_compared_with_groups_like_it(copied: Callable[[str], Path]) -> None:
    file = copied("dcp-fsdp2") / "step-2" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    name = next(key for key in metadata.state_dict_metadata if key.endswith(".exp_avg_sq"))
    change(file, drop_from_metadata(name))
    assert "expected exp_avg_sq" in said("check", file.parent).out


@pytest.mark.parametrize("name", ["more.pt", "more.safetensors"])
@pytest.mark.parametrize(
    ("fixture", "file"),
    [("lightning-plain", LAST), ("lightning-plain", FABRIC), ("composer", COMPOSER), ("timm", "last.pth.tar")],
)
def test_a_stray_file_next_to_a_single_file(copied: Callable[[str], Path], fixture: str, file: str, name: str) -> None:
    path = copied(fixture) / file
    tensors = {"w": torch.ones(2)}
    torch.save(tensors, path.with_name(name)) if name.endswith(".pt") else save_file(tensors, path.with_name(name))
    assert f"{name}: not read: " in said("check", path).out
    assert f"not read: ../{name}: " in said("resume", path).err
    assert said("inspect", path).out.count("not read") == 1


def test_a_file_copied_over_another_step(copied: Callable[[str], Path]) -> None:
    run = copied("composer")
    shutil.copy(run / "ep1-ba2-rank0.pt", run / COMPOSER)
    checked = said("check", run)
    assert checked.code == 4 and f"called {COMPOSER}, but it is from step 2, like ep1-ba2-rank0.pt" in checked.out
    assert "like ep1-ba2-rank0.pt" in said("resume", run).err
    run = copied("timm")
    shutil.copy(run / "checkpoint-1.pth.tar", run / "checkpoint-2.pth.tar")
    assert "called checkpoint-2.pth.tar, but it is from step 1" in said("check", run).out
    steps = copied("lightning") / "checkpoints"
    shutil.copytree(steps / "epoch=0-step=4.ckpt", steps / "epoch=0-step=6.ckpt")
    assert "called epoch=0-step=6.ckpt, but it is from step 4" in said("check", steps).out
    run = copied("torch-checkpointing")
    for rank in (0, 1):
        shutil.copy(run / "step-2" / f"step_{rank}.pt", run / "step-3" / f"step_{rank}.pt")
    assert "called step-3, but it is from step 2, like step-2" in said("check", run).out
    shutil.rmtree(steps / "epoch=0-step=4.ckpt")  # then the name may count something else
    assert ckpt("check", steps).code == 0


def test_lightnings_record_of_another_step_and_cut_off(copied: Callable[[str], Path]) -> None:
    steps = copied("lightning") / "checkpoints"
    last, step = steps / "last.ckpt", steps / "epoch=0-step=4.ckpt"
    record = (last / "meta.pt").read_bytes()
    shutil.copy(step / "meta.pt", last / "meta.pt")
    checked = said("check", last)
    assert "the model is from step 4, but the optimizer has taken 5" in checked.out and WHOLE not in checked.out
    (last / "meta.pt").write_bytes(record)
    halve(last / "meta.pt")
    assert ckpt("check", steps).code == 4 and ckpt("resume", last).code == 4
    resumed = said("resume", steps)
    assert (resumed.code, resumed.out) == (0, str(step)) and "last.ckpt is skipped" in resumed.err


@pytest.mark.parametrize(
    ("name", "what"), [("train", "begins at step 0 without it"), (".metadata.json", "finds no step without it")]
)
def test_olmo_cores_only_step_without_its_trainer_state(copied: Callable[[str], Path], name: str, what: str) -> None:
    step = copied("olmo-core") / "step2"
    shutil.rmtree(step / name) if name == "train" else (step / name).unlink()
    assert what in said("check", step).out and WHOLE not in said("check", step).out
    assert what in said("resume", step.parent).err


def test_resume_refuses_a_trainer_state_that_is_cut_off(copied: Callable[[str], Path]) -> None:
    run = copied("olmo-core")
    halve(run / "step2" / "train" / "rank1.pt")
    for place in (run, run / "step2", run / "step2" / "model_and_optim"):
        refused = said("resume", place)
        assert refused.code == 4 and "rank1.pt" in refused.err, refused.err


@pytest.mark.parametrize(
    ("fixture", "place", "name"),
    [
        (
            "lerobot",
            "checkpoints/000002",
            "pretrained_model/policy_preprocessor_step_3_normalizer_processor.safetensors",
        ),
        ("lerobot", "checkpoints/000002", "pretrained_model/policy_preprocessor.json"),
        ("lerobot", "checkpoints/000002", "pretrained_model/train_config.json"),
        ("diffusers", ".", "scheduler"),
        ("sentence-transformers", "checkpoint-2", "1_Pooling"),
        ("sentence-transformers", "checkpoint-2", "2_Dense/config.json"),
    ],
)
def test_a_missing_by_product(copied: Callable[[str], Path], fixture: str, place: str, name: str) -> None:
    step = copied(fixture) / place
    lost = step / name
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    checked = said("check", step)
    assert checked.code == 4 and f"{name}" in checked.out and ": missing" in checked.out, checked.out


def no_query(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["encoder.layer.0.attention.self.query.weight"]


def large_query(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.0.attention.self.query.weight"] = torch.ones(9, 9)


def no_linear(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["linear.weight"]


def turned_linear(tensors: dict[str, torch.Tensor]) -> None:
    tensors["linear.weight"] = tensors["linear.weight"].t().contiguous()


@pytest.mark.parametrize(
    ("file", "act", "what", "code"),
    [
        ("model.safetensors", no_query, "missing: 1 tensor from BertModel's files", 6),
        ("model.safetensors", large_query, "other shapes: 1 of another shape", 6),
        ("model.safetensors", dict.clear, "missing: 23 tensors", 6),
        ("2_Dense/model.safetensors", no_linear, "Dense lacks linear.weight", 0),
        ("2_Dense/model.safetensors", turned_linear, "linear.weight is [8, 6] instead of [6, 8]", 0),
        ("2_Dense/config.json", lambda config: config.update(out_features=9), "[6, 8] instead of [9, 8]", 0),
        ("3_LayerNorm/config.json", lambda config: config.update(dimension=5), "[6] instead of [5]", 0),
    ],
)
@pytest.mark.parametrize("place", ["final", "checkpoint-2"])
def test_modules_are_compared_with_their_configs(
    copied: Callable[[str], Path], place: str, file: str, act: Callable[[Any], object], what: str, code: int
) -> None:
    folder = copied("sentence-transformers") / place
    change(folder / file, act)
    checked = said("check", folder)
    assert checked.code == 4, checked.out
    if place == "checkpoint-2" and act is turned_linear:  # the optimizer proves it first
        return
    assert what in checked.out, checked.out
    done = ckpt("convert", "auto", "hf", folder, "-o", folder.with_name("out"))
    assert done.code == code
    assert code or "SentenceTransformer cannot load this folder" in done.err.splitlines()[-1]


def test_an_optimizer_without_states_and_without_a_step(copied: Callable[[str], Path]) -> None:
    path = copied("timm") / "last.pth.tar"
    change(path, lambda root: root["optimizer"]["state"].clear())
    for command in ("check", "inspect", "resume"):
        done = said(command, path)
        assert done.code == 0 and "the optimizer has no states" in done.out + done.err and WHOLE not in done.out


def test_a_model_without_a_list_of_its_tensors(copied: Callable[[str], Path]) -> None:
    """A tensor deleted with its states leaves no trace, so the last line claims less."""
    path = copied("composer") / COMPOSER

    def drop(root: Any) -> None:
        del root["state"]["model"]["layers.1.bias"]
        optimizer = root["state"]["optimizers"]["AdamW"]
        del optimizer["state"]["layers.1.bias"]
        optimizer["param_groups"][0]["params"].remove("layers.1.bias")

    change(path, drop)
    assert api.open(path).optimizer_states
    assert f"{WHOLE} in the files is there; the model's tensors are not listed" in said("check", path).out
    assert f"{WHOLE} is there; bytes" in said("check", copied("trainer-plain")).out


@pytest.mark.parametrize("place", ["last.ckpt", "fabric"])
def test_names_of_steps_are_not_strays(copied: Callable[[str], Path], place: str) -> None:
    run = copied("lightning-plain")
    assert ": not read" not in said("check", run / ("checkpoints" if place == "last.ckpt" else place)).out


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"blk.0.attn_q.weight", b"blk.0.attn_x.weight", "a tensor is missing from the GGUF model"),
        (b"output_norm.weight", b"output_more.weight", "a tensor is missing from the GGUF model"),
        (b"block_count\x04\0\0\0\x01", b"block_count\x04\0\0\0\x02", "20 tensors of 2 layers"),
        (b"key_length\x04\0\0\0\x10", b"key_length\x04\0\0\0\x08", "the shape contradicts"),
        (b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0other", ""),
    ],
)
def test_gguf_is_compared_with_its_own_hyperparameters(
    copied: Callable[[str], Path], old: bytes, new: bytes, what: str
) -> None:
    path = copied("gguf") / "llama-bf16.gguf"
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    checked = said("check", path)
    assert (checked.code == 4 and what in checked.out) if what else "are not listed" in checked.out, checked.out


def test_hf_trainers_model_without_a_tensor_of_its_config(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("trainer-plain")
    step = run / "checkpoint-2"
    lost = "model.layers.0.mlp.down_proj.weight"
    assert said("resume", run).code == 0 and lost not in said("convert", "auto", "dcp", run, "-o", tmp_path / "a").err
    change(step / "model.safetensors", lambda tensors: tensors.pop(lost))
    assert ckpt("check", run).code == 4
    for options in ((), ("--format", "zero3", "--world-size", "2")):
        refused = said("resume", run, *options)
        assert refused.code == 4 and lost in refused.err, refused.err
    done = said("convert", "auto", "dcp", run, "-o", tmp_path / "b")
    assert done.code == 0 and f"1 missing: {lost}" in done.err, done.err


DOWN = "model.layers.0.mlp.down_proj.weight"


def rename_down(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.dwn_proj.weight"] = tensors.pop(DOWN)


def swap_down_for_a_smaller_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more.weight"] = tensors.pop(DOWN)[:-1].clone()


def swap_down_for_another_kind_of_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[DOWN]
    tensors["more.weight"] = torch.zeros(100, 100)


def fuse_down(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mlps.weight"] = torch.stack([tensors.pop(DOWN)] * 2)


def split_rows_of_down(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more.weight"] = tensors.pop(DOWN).unflatten(0, (2, -1))


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more.weight"] = torch.zeros(3, 4)


UNKNOWN_NAMES = [
    (rename_down, "parts not checked", f"missing, or under another name: 1 tensor from {{cls}}: {DOWN}"),
    (fuse_down, "parts not checked", f"missing, or under another name: 1 tensor from {{cls}}: {DOWN}"),
    (split_rows_of_down, "parts not checked", f"missing, or under another name: 1 tensor from {{cls}}: {DOWN}"),
    (swap_down_for_another_kind_of_tensor, "incomplete", f"missing: 1 tensor from {{cls}}: {DOWN}"),
    (swap_down_for_a_smaller_tensor, "incomplete", f"missing: 1 tensor from {{cls}}: {DOWN}"),
    (add_one, "whole", "{cls} don't have 1 tensor: more.weight"),
]


@pytest.mark.parametrize(
    ("act", "state", "what", "format"),
    sample(
        [(*case, format) for format in ("hf", "trainer") for case in UNKNOWN_NAMES],
        lambda case: (case[0], (case[1], case[3])),
    ),
)
def test_a_name_that_the_configs_class_does_not_know(
    copied: Callable[[str], Path],
    tmp_path: Path,
    act: Callable[[dict[str, torch.Tensor]], None],
    state: str,
    what: str,
    format: str,
) -> None:
    """The training's own code may explain another name, but no file says so."""
    step = copied("trainer-plain") / "checkpoint-2"
    change(step / "model.safetensors", act)
    if format == "hf":
        for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
            (step / name).unlink()
    checked = said("check", step)
    assert f"checkpoint-2: {state} ({format}" in checked.out and WHOLE not in checked.out, checked.out
    assert what.format(cls="Qwen3MoeForCausalLM's files") in checked.out, checked.out
    is_lost = state == "incomplete"
    assert checked.code == (4 if is_lost else 0)
    assert json.loads(ckpt("check", step, "--json").out)["whole"] is (state == "whole")
    if format == "trainer":
        assert said("resume", step).code == (4 if is_lost else 0)
        copy = said("convert", "auto", "dcp", step, "-o", tmp_path / "dcp")
        assert copy.code == 0 and "names or shapes don't match" in copy.err
        assert WHOLE not in said("check", tmp_path / "dcp").out
    assert said("convert", "auto", "hf", step, "-o", tmp_path / "hf").code == 6


def test_hf_trainers_lost_optimizer_is_named(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("trainer-plain")
    lost = "optimizer.pt is missing: HF Trainer saves scheduler.pt only with an optimizer"
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    assert lost in said("check", run).out
    assert f"note: {lost}" in said("convert", "auto", "zero3", run, "--world-size", "2", "-o", tmp_path / "out").err
    (run / "checkpoint-2" / "scheduler.pt").unlink()  # a person may keep the model alone
    assert lost not in said("check", run).out


@pytest.mark.parametrize("name", ["trainer-plain", "trl-fsdp2/outputs/llama-sft"])
def test_hf_trainers_only_step_without_its_record(fixtures: Path, tmp_path: Path, name: str) -> None:
    lost = "trainer_state.json, with the step's number, is missing: HF Trainer does not resume without it"
    step = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(fixtures / name / "checkpoint-2", step)
    assert all(lost not in said(command, step.parent).err + said(command, step).out for command in ("check", "resume"))
    (step / "trainer_state.json").unlink()
    for place in (step, step.parent):
        checked = said("check", place)
        assert lost in checked.out and WHOLE not in checked.out and "step 2" not in checked.out, checked.out
        assert f"note: {lost}" in said("resume", place).err
    (step / "scheduler.pt").unlink()  # other trainers write no such record
    assert lost not in said("check", step).out


@pytest.mark.parametrize(
    "place",
    sample(
        ("global_step1", "other/deep", "other", "checkpoint-1"),
        lambda place: (f"named: {place[-1].isdigit()}", f"deep: {'/' in place}"),
    ),
)
def test_a_folder_with_weights_in_hf_trainers_step(copied: Callable[[str], Path], tmp_path: Path, place: str) -> None:
    step = copied("trainer-plain") / "checkpoint-2"
    (step / "other" / "empty").mkdir(parents=True)
    assert ": not read" not in said("check", step).out
    (step / place).mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.zeros(2)}, step / place / "model.safetensors")
    for folder in (step, step.parent):
        assert f"{place}: not read: a folder with a model's weights" in said("check", folder).out
        assert f"not read: {place}/: a folder with a model's weights" in said("resume", folder).err
        done = said("convert", "auto", "hf", folder, "-o", tmp_path / "hf", "--overwrite")
        assert f"not read: {place}/: a folder with a model's weights" in done.err


def count_on(*keys: str) -> Callable[[Any], Any]:
    def act(root: Any) -> Any:
        for key in keys[:-1]:
            root = root[key]
        root[keys[-1]] += 7

    return act


@pytest.mark.parametrize(
    ("fixture", "file", "act"),
    [
        ("olmo-core", "step2/train/rank1.pt", count_on("global_step")),
        (
            "verl-fsdp2",
            "global_step_3/actor/extra_state_world_size_2_rank_1.pt",
            count_on("lr_scheduler", "last_epoch"),
        ),
        ("torch-checkpointing", "step-3/lr_scheduler_1.pt", count_on("last_epoch")),
        ("torch-checkpointing", "step-3/step_1.pt", None),
    ],
    ids=["olmo-core", "verl", "torch_checkpointing schedule", "torch_checkpointing step"],
)
def test_one_ranks_file_of_another_step(
    copied: Callable[[str], Path], fixture: str, file: str, act: Callable[[Any], Any] | None
) -> None:
    mixed = "the folder mixes ranks from different steps"
    run = copied(fixture)
    step = run / Path(file).parts[0]
    assert mixed not in said("check", step).out and mixed not in said("resume", step).err
    if act is None:
        torch.save(2, run / file)
    else:
        change(run / file, act)
    checked, resumed = said("check", step), said("resume", step)
    assert checked.code == 4 and mixed in checked.out and Path(file).name in checked.out, checked.out
    assert resumed.code == 4 and mixed in resumed.err and WHOLE not in checked.out


def test_accelerates_ranks_may_count_other_batches(copied: Callable[[str], Path]) -> None:
    """Each rank counts from the end of its own data loader, and loaders may have different lengths (even_batches)."""
    step = copied("accelerate-loader") / "step_4"
    before = said("check", step), said("resume", step)
    change(step / "random_states_1.pkl", count_on("step"))
    after = said("check", step), said("resume", step)
    assert [(one.code, one.out) for one in after] == [(one.code, one.out) for one in before]


def test_a_record_above_a_single_step_is_checked(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ckpt("convert", "zero2", "universal", copied("toy-zero2"), "-o", run).code == 0
    assert ckpt("check", run).code == 0
    (run / "latest_universal").unlink()
    (run / "latest_universal").symlink_to("latest_universal")
    checked = said("check", run)
    assert checked.code == 4 and "latest_universal: it is not a file" in checked.out and WHOLE not in checked.out
