"""`ckpt/runs/half_checkpoints.py`: optimizer states without their model are half a checkpoint, for every command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt import api
from ckpt.errors import CorruptError, HalfError
from tests.support.commands import ckpt
from tests.support.dcp_folders import save

FIXTURES = Path("fixtures")
STATE = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(1.0)}
OPTIMIZER = {"state": {"w": STATE}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
FLAT = {**{f"state.w.{name}": value for name, value in STATE.items()}, "param_groups.w.lr": 0.1}


def _without(fixture: str, pattern: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(FIXTURES / fixture, folder)
        for gone in list(folder.rglob(pattern)):
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        return folder

    return make


def _torch_file(name: str, root: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        torch.save(root, folder / name)
        return folder if name.startswith("optimizer") else folder / name

    return make


def _universal(folder: Path) -> Path:
    api.plan(api.open(FIXTURES / "toy-zero2"), "universal").run(folder)
    next(folder.rglob("mp_rank_00_model_states.pt")).unlink()
    return folder


HALVES: dict[str, Callable[[Path], Path]] = {
    "Accelerate's pair": lambda folder: save({"optimizer": OPTIMIZER}, folder / "optimizer_0").parent,
    "Accelerate's folder": lambda folder: save({"optimizer": OPTIMIZER}, folder / "optimizer_0"),
    "DCP": lambda folder: save({"optim": FLAT}, folder),
    "DCP in a folder": lambda folder: save({"app": {"optimizer": OPTIMIZER}}, folder / "inner").parent,
    "verl": _without("verl-fsdp2", "model_world_size*"),
    "HF Trainer": _without("trainer-plain/checkpoint-2", "model.safetensors"),
    "Axolotl": _without("axolotl-fsdp2/outputs/gpt-oss-out/checkpoint-2", "pytorch_model_fsdp_0"),
    "ZeRO-1": _without("toy-zero1", "*model_states.pt"),
    "ZeRO-2": _without("toy-zero2/global_step2", "*model_states.pt"),
    "ZeRO-3": _without("toy-zero3", "*model_states.pt"),
    "AutoTP": _without("autotp-zero2", "*model_states.pt"),
    "GPT-NeoX": _without("neox-zero1", "*model_states.pt"),
    "universal": _universal,
    "Accelerate's torch file": _torch_file("optimizer.bin", OPTIMIZER),
    "a torch file": _torch_file("state.pt", OPTIMIZER),
    "a bundle": _torch_file("state.pt", {"epoch": 3, "optimizer": OPTIMIZER}),
    "a bundle with an empty model": _torch_file("state.pt", {"model": {}, "optimizer": OPTIMIZER}),
}


@pytest.mark.parametrize("kind", HALVES)
def test_no_command_makes_a_checkpoint_from_optimizer_states_alone(kind: str, tmp_path: Path) -> None:
    place, out = HALVES[kind](tmp_path / "source"), tmp_path / "out"
    for to in ("hf", "full", "dcp", "zero2", "universal", "fsdp-ranks"):
        done = ckpt("convert", "auto", to, place, "-o", out)
        assert done.code == HalfError.exit_code, done.err
        assert "has only optimizer states" in done.err
        assert not out.exists()
    for extra in ((), ("--model-only",), ("--format", "hf")):
        done = ckpt("resume", place, *extra)
        assert (done.code, done.out) == (HalfError.exit_code, "")
        assert "has only optimizer states" in done.err
    shown = ckpt("inspect", place)
    assert "only optimizer states" in shown.out + shown.err
    checked = ckpt("check", place)
    assert checked.code == CorruptError.exit_code
    assert "half a checkpoint" in checked.out and "every part of every tensor" not in checked.out


def test_the_hint_names_the_model_of_the_same_save(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / "model")
    save({"optimizer": OPTIMIZER}, tmp_path / "optimizer")
    with pytest.raises(HalfError) as caught:
        api.plan(tmp_path / "optimizer", "hf")
    assert caught.value.hint == f"the model is in {tmp_path / 'model'}: give that folder"
    assert ckpt("convert", "auto", "hf", tmp_path / "model", "-o", tmp_path / "out").code == 0


def test_the_hint_names_no_model_of_another_save(tmp_path: Path) -> None:
    save({"model": {"v": torch.ones(2)}}, tmp_path / "model")
    save({"optimizer": OPTIMIZER}, tmp_path / "optimizer")
    with pytest.raises(HalfError) as caught:
        api.plan(tmp_path / "optimizer", "hf")
    assert str(tmp_path) not in (caught.value.hint or "")


def test_deepspeeds_hint_names_the_model_file_of_the_step(tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "trainer-zero2" / "checkpoint-2", tmp_path / "checkpoint-2")
    written = tmp_path / "written"
    api.plan(api.open(step), "hf").run(written)
    next(step.rglob("mp_rank_00_model_states.pt")).unlink()
    assert "the model is in" not in ckpt("convert", "auto", "hf", step, "-o", tmp_path / "out").err
    model = shutil.copy(written / "model.safetensors", step)
    done = ckpt("convert", "auto", "hf", step, "-o", tmp_path / "out")
    assert done.code == HalfError.exit_code and f"the model is in {model}: give that file" in done.err
    assert ckpt("convert", "auto", "hf", model, "-o", tmp_path / "out").code == 0


def test_a_half_step_is_passed_over_with_a_note(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "trainer-plain" / "checkpoint-2", tmp_path / "checkpoint-2")
    save({"optimizer": OPTIMIZER}, tmp_path / "checkpoint-4" / "optimizer_0")
    done = ckpt("resume", tmp_path)
    assert done.code == 0
    assert done.out.strip() == str(tmp_path / "checkpoint-2")
    assert "checkpoint-4 is skipped" in done.err


def test_a_checkpoint_without_tensors_is_never_converted(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    save_file({}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    done = ckpt("convert", "auto", "hf", model, "-o", tmp_path / "out")
    assert done.code == CorruptError.exit_code and "has no tensors" in done.err
    assert ckpt("check", model).code == CorruptError.exit_code


def test_dcp_next_to_megatrons_tracker_is_dcp(tmp_path: Path) -> None:
    """In slime, DCP lies in Megatron's folders, with Megatron's tracker."""
    step = save({"app": {"model": {"w": torch.ones(2)}, "optim": OPTIMIZER}}, tmp_path / "iter_0000002")
    torch.save({"torch": torch.get_rng_state(), "cuda": []}, step / "rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert ckpt("check", tmp_path).code == 0
    for flags in ((), ("--world-size", "4")):
        done = ckpt("resume", tmp_path, *flags)
        assert (done.code, done.out.strip()) == (0, str(step))
    assert ckpt("inspect", tmp_path, "--json").code == 0


@pytest.mark.parametrize(
    ("fixture", "by_product", "content"),
    [
        ("dcp-fsdp2/step-2", "trainer_state.json", '{"global_step": 2}'),
        ("dcp-fsdp2/step-2", "latest", "global_step2"),
        ("trainer-plain/checkpoint-2", "latest", "global_step2"),
        ("trainer-plain/checkpoint-2", "latest_checkpointed_iteration.txt", "2"),
        ("megatron-lm/iter_0000002", "trainer_state.json", '{"global_step": 2}'),
        ("megatron-lm/iter_0000002", "latest", "global_step2"),
        ("toy-zero2/global_step2", "latest_checkpointed_iteration.txt", "2"),
        ("toy-zero2/global_step2", "trainer_state.json", '{"global_step": 2}'),
        ("verl-fsdp2/global_step_3/actor", "latest", "global_step3"),
        ("verl-fsdp2/global_step_3/actor", "trainer_state.json", '{"global_step": 3}'),
    ],
)
def test_the_framework_comes_from_the_content(fixture: str, by_product: str, content: str, tmp_path: Path) -> None:
    place = shutil.copytree(FIXTURES / fixture, tmp_path / Path(fixture).name)
    alone = api.open(place)
    (place / by_product).write_text(content)
    found = api.open(place)
    assert (found.format, found.path) == (alone.format, alone.path)
    assert found.tensors.keys() == alone.tensors.keys()


def _sharded(folder: Path) -> Path:
    """Write a model like transformers 5.24: DCP's safetensors files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    dcp.save({"w": torch.ones(2)}, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True), no_dist=True)
    return folder


@pytest.mark.parametrize("optimizer", ["any_name", "../optim", "../optimizer"])
def test_model_and_optimizer_of_one_save_are_one_checkpoint(optimizer: str, tmp_path: Path) -> None:
    model = _sharded(tmp_path / "step" / "model")
    save({"optimizer": FLAT}, place := (model / optimizer).resolve())
    found = api.open(model)
    assert found.optimizer_states == ("exp_avg", "exp_avg_sq", "step")
    done = ckpt("resume", model, "--world-size", "4")
    expected = model if optimizer == "any_name" else model.parent
    assert (done.code, done.out.strip()) == (0, str(expected)), done.err
    assert ckpt("check", model).code == 0
    os.truncate(next(place.glob("*.distcp")), 10)
    assert ckpt("check", model).code == CorruptError.exit_code


def test_a_model_by_save_pretrained_and_its_optimizers_folder(tmp_path: Path) -> None:
    """As `save_pretrained(X)` and `save_optimizer_distributed(..., X/optimizer)` of transformers 5.24 write them."""
    save({"optimizer": FLAT}, tmp_path / "step" / "optimizer")
    save_file({"w": torch.ones(2)}, tmp_path / "step" / "model.safetensors")
    done = ckpt("resume", tmp_path / "step", "--world-size", "3")
    assert (done.code, done.out.strip()) == (0, str(tmp_path / "step")), done.err
    assert api.open(tmp_path / "step").optimizer_states == ("exp_avg", "exp_avg_sq", "step")
    assert ckpt("check", tmp_path / "step").code == 0
    alone = ckpt("resume", tmp_path / "step" / "optimizer")
    assert alone.code == HalfError.exit_code
    assert f"the model is in {tmp_path / 'step'}: give that folder" in alone.err
    save_file({"v": torch.ones(2)}, tmp_path / "step" / "model.safetensors")
    assert ckpt("check", tmp_path / "step").code == CorruptError.exit_code


def test_another_checkpoint_in_a_models_folder_is_not_its_optimizer(tmp_path: Path) -> None:
    model = _sharded(tmp_path / "model")
    save({"model": {"w": torch.zeros(2)}, "optimizer": OPTIMIZER}, model / "inner")
    assert not api.open(model).optimizer_states


def test_verls_model_next_to_dist_ckpt(tmp_path: Path) -> None:
    """With mbridge, verl keeps the model in huggingface/; without mbridge the folder only has the config."""
    actor = tmp_path / "global_step_5" / "actor"
    step = shutil.copytree(FIXTURES / "megatron-lm" / "iter_0000002", actor / "dist_ckpt")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert (api.open(step).config or {}).get("vocab_size") == 7
    assert api.open(tmp_path).path == str(step)


def test_megatrons_optimizer_alone_is_half(tmp_path: Path) -> None:
    place = tmp_path / "actor" / "dist_ckpt"
    state = {
        f"optimizer.state.{name}.decoder.layers.self_attention.linear_qkv.weight": torch.ones(1, 4, 4)
        for name in ("exp_avg", "exp_avg_sq", "fp32_param")
    }
    save(state, place)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": None}, place / "common.pt")
    (place.parent / "huggingface").mkdir()
    save_file({"w": torch.ones(2)}, place.parent / "huggingface" / "model.safetensors")
    done = ckpt("convert", "auto", "megatron-dist", place, "-o", tmp_path / "out")
    assert done.code == HalfError.exit_code, done.err
    assert f"the model is in {place.parent / 'huggingface'}: give that folder" in done.err
    assert "half a checkpoint" in ckpt("check", place).out


@pytest.mark.parametrize("names", [("model", "optimizer"), ("pytorch_model_fsdp_0", "optimizer_0")])
def test_an_optimizer_of_another_model_is_not_paired(names: tuple[str, str], tmp_path: Path) -> None:
    model = save({"model": {"w": torch.ones(2)}}, tmp_path / "checkpoint-2" / names[0])
    place = model if names[0] == "model" else model.parent
    save({"optimizer": OPTIMIZER}, model.parent / names[1])
    assert ckpt("check", place).code == 0 and api.open(place).optimizer_states
    shutil.rmtree(model.parent / names[1])
    other = {"state": {"v": STATE}, "param_groups": [{"params": ["v"], "lr": 0.1}]}
    save({"optimizer": other}, model.parent / names[1])
    for command in (("check", place), ("convert", "auto", "full", place, "-o", tmp_path / "out"), ("resume", place)):
        done = ckpt(*command)
        assert done.code == CorruptError.exit_code, done
        assert "the optimizer folder belongs to another model" in done.out + done.err
