"""`ckpt/runs/finding.py`: several models in one Accelerate save: commands ask, `check` checks all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api, check
from ckpt.errors import IncompleteError, LossError, UsageError
from tests.support.commands import ckpt
from tests.support.dcp_folders import save
from tests.support.describing import content
from tests.support.places import REPOSITORY
from tests.support.sampling import sample


def _state(value: float) -> dict[str, object]:
    states = {"exp_avg": torch.full((2, 3), value), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(2.0)}
    return {"state": {"w": states}, "param_groups": [{"params": ["w"], "lr": 0.1 * value}]}


def _by_number(value: float) -> dict[str, object]:
    return {"state": {0: _state(value)["state"]["w"]}, "param_groups": [{"params": [0], "lr": 0.1 * value}]}  # type: ignore[index]


def deepspeed(folder: Path) -> tuple[str, str]:
    for name in ("pytorch_model", "pytorch_model_1"):
        shutil.copytree(REPOSITORY / "fixtures" / "toy-zero2" / "global_step2", folder / name)
    (folder / "latest").write_text("pytorch_model_1")
    return "pytorch_model", "pytorch_model_1"


def fsdp(folder: Path) -> tuple[str, str]:
    for number in (0, 1):
        save({"model": {"w": torch.full((2, 3), float(number))}}, folder / f"pytorch_model_fsdp_{number}")
        save({"optimizer": _state(number + 1.0)}, folder / f"optimizer_{number}")
    return "pytorch_model_fsdp_0", "pytorch_model_fsdp_1"


def plain(folder: Path) -> tuple[str, str]:
    folder.mkdir()
    for number, end in enumerate(("", "_1")):
        save_file({"w": torch.full((2, 3), float(number))}, folder / f"model{end}.safetensors")
        torch.save(_by_number(number + 1.0), folder / f"optimizer{end}.bin")
    return "model.safetensors", "model_1.safetensors"


def full(folder: Path) -> tuple[str, str]:
    folder.mkdir()
    for number, end in enumerate(("", "_1")):
        torch.save({"w": torch.full((2, 3), float(number))}, folder / f"pytorch_model_fsdp{end}.bin")
        torch.save(_state(number + 1.0), folder / f"optimizer{end}.bin")
    return "pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"


def rank_files(folder: Path) -> tuple[str, str]:
    """Write rank files like Accelerate with use_dcp=False."""
    folder.mkdir()
    for number in (0, 1):
        for rank in (0, 1):
            torch.save({"w": torch.full((2, 3), float(number))}, folder / f"pytorch_model_fsdp_{number}_rank{rank}.bin")
            torch.save(_state(number + 1.0), folder / f"optimizer_{number}_rank{rank}.bin")
    return "pytorch_model_fsdp_0", "pytorch_model_fsdp_1"


def local(folder: Path) -> tuple[str, str]:
    """Save two runs of one model as FSDP1's LOCAL_STATE_DICT with Accelerate's own functions."""
    for number, run in enumerate(("local-flat", "local-orig")):
        source, end = REPOSITORY / "fixtures" / run / "checkpoint-2", f"_{number}" if number else ""
        for file in source.glob("*.bin"):
            folder.mkdir(exist_ok=True)
            shutil.copy(file, folder / file.name.replace("_rank", f"{end}_rank"))
        shutil.copytree(source / "optimizer_0", folder / f"optimizer_{number}")
        shutil.copy(source / "config.json", folder)
    return "pytorch_model_fsdp", "pytorch_model_fsdp_1"


SAVES: dict[str, Callable[[Path], tuple[str, str]]] = {
    one.__name__: one for one in (deepspeed, fsdp, plain, full, rank_files, local)
}


def path_of(save: Path, model: str) -> Path:
    """Return the model's folder or file in a save, or its first rank's file."""
    return save / model if (save / model).exists() else save / f"{model}_rank0.bin"


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_of_two_models_is_asked_about(kind: str, tmp_path: Path) -> None:
    names = SAVES[kind](place := tmp_path / "save")
    for command in (("inspect", place), ("convert", "auto", "hf", place, "-o", tmp_path / "out"), ("hash", place)):
        done = ckpt(*command)
        assert done.code == UsageError.exit_code, done.err
        assert "this save has 2 models" in done.err and ", ".join(names) in done.err
        assert f"--tag {names[0]} or --tag {names[1]}" in done.err
    assert not (tmp_path / "out").exists()
    for tag in names:
        done = ckpt("convert", "auto", "dcp", place, "-o", tmp_path / tag, "--tag", tag)
        assert done.code == 0, done.err
        written, given = api.open(tmp_path / tag), api.open(path_of(place, tag))
        assert written.optimizer_states == given.optimizer_states
        assert given.optimizer_states or kind == "plain"  # without a config its numbers prove nothing
        assert any("optim" in Path(file.path).name or "optimizer" in file.path for file in given.files)


@pytest.mark.parametrize("kind", ["fsdp", "full", "rank_files"])
def test_each_model_keeps_its_own_optimizer(kind: str, tmp_path: Path) -> None:
    names = SAVES[kind](place := tmp_path / "save")
    for number, name in enumerate(names):
        found = api.open(place, tag=name)
        assert found.state.param_groups[0].options["lr"] == pytest.approx(0.1 * (number + 1))
        out = tmp_path / f"full{number}"
        assert ckpt("convert", "auto", "full", place, "--tag", name, "-o", out).code == 0
        optimizer = torch.load(out / "optimizer.bin", weights_only=True)
        assert torch.equal(optimizer["state"]["w"]["exp_avg"], torch.full((2, 3), number + 1.0))
        out = tmp_path / f"hf{number}"
        assert ckpt("convert", "auto", "hf", path_of(place, name), "-o", out).code == 0
        assert torch.equal(load_file(out / "model.safetensors")["w"], torch.full((2, 3), float(number)))


@pytest.mark.parametrize("kind", SAVES)
def test_check_looks_at_every_model_of_a_save(kind: str, tmp_path: Path) -> None:
    names = SAVES[kind](place := tmp_path / "save")
    assert ckpt("check", place).code == 0
    for name in names:
        again = shutil.copytree(place, tmp_path / f"cut-{name}")
        inside = [one for one in (again / name, *(again / name).rglob("*")) if one.is_file()]
        file = max(inside or again.glob(f"{name}_rank1.bin"), key=lambda one: one.stat().st_size)
        file.write_bytes(file.read_bytes()[:-20])
        assert ckpt("check", again).code == IncompleteError.exit_code, name
    for one in (place / names[0], *place.glob(f"{names[0]}_rank?.bin")):
        shutil.rmtree(one) if one.is_dir() else one.unlink(missing_ok=True)
    done = ckpt("check", place)
    assert done.code == IncompleteError.exit_code and names[0] in done.out + done.err
    done = ckpt("convert", "auto", "hf", place, "-o", tmp_path / "out")
    assert done.code == IncompleteError.exit_code and "this save lacks a model" in done.err
    assert ckpt("resume", place).code == IncompleteError.exit_code


@pytest.mark.parametrize("kind", SAVES)
def test_resume_carries_all_models_or_refuses(kind: str, tmp_path: Path) -> None:
    names = SAVES[kind](place := tmp_path / "save")
    done = ckpt("resume", place)
    assert (done.code, done.out.strip()) == (0, str(place)), done.err
    assert "taking" not in done.err and "skipped" not in done.err and "not read" not in done.err
    assert f"the save holds 2 models; the engine loads all: {', '.join(names)}" in done.err
    done = ckpt("resume", place, "--format", "universal")
    assert done.code == LossError.exit_code and "a save of 2 models" in done.err
    assert all(str(path_of(place, name)) in done.err for name in names)
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


#: Numbers of a save's tags, and the paths that each tag is tried with.
ASKED = sample(
    [(number, of) for number in range(4) for of in ("the save", "the run", "the run and its step")], lambda case: case
)


@pytest.mark.parametrize("kind", SAVES)
def test_every_command_takes_the_tag_of_a_model(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    names = SAVES[kind](place := run / "checkpoint-4")
    for number, tag in enumerate((*names, *(name.partition(".")[0] for name in names if "." in name))):
        model = path_of(place, next(name for name in names if tag in (name, name.partition(".")[0])))
        whole = check(place, tag=tag, every_byte=True)
        assert whole.whole and whole.checkpoints[0].num_files >= len(api.open(model).files)
        assert ckpt("inspect", place, "--tag", tag).code == 0
        equal = ckpt("verify", place, model, "--tag-a", tag)
        assert equal.code == 0 and "equal" in equal.out
        given = {"the save": (place, tag), "the run": (run, tag), "the run and its step": (run, f"checkpoint-4/{tag}")}
        for path, full_tag in (given[of] for one, of in ASKED if one == number):
            assert Path(api.open(path, tag=full_tag).path) == model
            assert ckpt("resume", path, "--tag", full_tag).out.strip() == str(place)
    done = ckpt("inspect", place, "--tag", "model_7")
    assert done.code == 3 and f"use --tag {names[0]} or --tag {names[1]}" in done.err


def test_a_model_in_files_of_ranks_is_the_live_one(tmp_path: Path) -> None:
    names = local(tmp_path)
    for name, run in zip(names, ("local-flat", "local-orig"), strict=True):
        found, alone = api.open(tmp_path, tag=name), api.open(REPOSITORY / "fixtures" / run / "checkpoint-2")
        assert found.state.param_groups == alone.state.param_groups
        assert {key: content(one) for key, one in found.tensors.items()} == {
            key: content(one) for key, one in alone.tensors.items()
        }


def test_a_model_that_is_not_loaded_is_passed_over(tmp_path: Path) -> None:
    fsdp(tmp_path)
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_1")
    shutil.rmtree(tmp_path / "optimizer_1")
    done = ckpt("resume", tmp_path)
    assert done.code == 0 and "itself (hf), it holds no optimizer" in done.err


def test_one_model_is_not_asked_about(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    shutil.rmtree(tmp_path / "pytorch_model_1")
    (tmp_path / "latest").write_text("pytorch_model")
    assert ckpt("inspect", tmp_path).code == 0
    assert ckpt("check", tmp_path).code == 0
    assert ckpt("resume", tmp_path).out.strip() == str(tmp_path)


def test_optimizers_without_recorded_models_are_not_guessed(tmp_path: Path) -> None:
    plain(place := tmp_path / "save")
    (place / "optimizer_1.bin").unlink()
    found = api.open(place, tag="model_1")
    assert not found.optimizer_states
    assert "does not record the pairs" in " ".join(found.notes)


def test_the_optimizer_next_to_a_model_of_fsdp_is_read(tmp_path: Path) -> None:
    fsdp(tmp_path)
    for number in (0, 1):
        found = api.open(tmp_path / f"pytorch_model_fsdp_{number}")
        assert found.state.param_groups[0].options["lr"] == pytest.approx(0.1 * (number + 1))


def engines(folder: Path, tags: tuple[str, str]) -> Path:
    """Write two DeepSpeed checkpoints for one step under free tags; `latest` names the last."""
    for tag in tags:
        shutil.copytree(REPOSITORY / "fixtures" / "toy-zero2" / "global_step2", folder / tag)
    (folder / "latest").write_text(tags[-1])
    return folder


def test_two_engines_under_free_tags_are_asked_for(tmp_path: Path) -> None:
    place = engines(tmp_path / "save", ("actor", "critic"))
    with pytest.raises(UsageError) as failure:
        api.open(place)
    assert failure.value.hint == "use --tag actor or --tag critic"
    assert Path(api.open(place, tag="actor").path).name == "actor"
    os.truncate(place / "actor" / "mp_rank_00_model_states.pt", 100)
    assert not check(place).whole
    with pytest.raises(UsageError):
        api.open(place)


def test_no_hint_calls_another_model_a_step(tmp_path: Path) -> None:
    place = tmp_path / "save"
    deepspeed(place)
    (cut,) = (place / "pytorch_model").glob("bf16_zero_pp_rank_0*")
    os.truncate(cut, 100)
    for command in ("resume", place), ("inspect", place, "--tag", "pytorch_model"):
        done = ckpt(*command)
        assert done.code == IncompleteError.exit_code and "hint: is this folder complete?" in done.err
        assert "--tag" not in done.err
    shutil.rmtree(place / "pytorch_model_1")
    done = ckpt("resume", place)
    assert done.code != 0 and "a missing step folder" in done.err and "--tag" not in done.err


def test_a_free_tag_next_to_steps_is_no_other_engine(tmp_path: Path) -> None:
    run = engines(tmp_path / "run", ("best", "global_step2"))
    assert Path(api.open(run).path).name == "global_step2"
    (run / "latest").write_text("best")
    assert Path(api.open(run).path).name == "best"


def test_check_covers_the_models_in_each_step(tmp_path: Path) -> None:
    for step, names in ((2, ("actor", "critic")), (4, ("actor", "critic")), (6, ("actor",))):
        for name in names:
            (folder := tmp_path / f"global_step_{step}" / name).mkdir(parents=True)
            save_file({"w.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    done = ckpt("check", tmp_path)
    assert done.code == 0 and done.out.count("models actor + critic") == 2, done.out
    assert ckpt("check", tmp_path / "global_step_4" / "critic").code == 0
