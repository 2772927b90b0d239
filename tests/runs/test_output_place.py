"""`ckpt/runs/output_place.py`: no output goes into a folder that a trainer rotates or searches."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import UsageError
from ckpt.runs.output_place import check_place, default_output, place_notes, run_root
from tests.support.commands import ckpt as run_ckpt

STEPS = ("checkpoint-4", "checkpoint_4", "step-4", "step_4", "step4", "global_step4", "iter_0000004", "epoch-4")


def make_steps(run: Path, *names: str) -> None:
    for name in names:
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("inner", ["", "/global_step4", "/pytorch_model_fsdp_0", "/actor/huggingface"])
def test_default_output_of_a_step_lies_next_to_the_run(tmp_path: Path, step: str, inner: str) -> None:
    (tmp_path / f"run/{step}{inner}").mkdir(parents=True)
    name = f"run/{step}{inner}".replace("/", "-")
    assert default_output(tmp_path / f"run/{step}{inner}", "hf") == tmp_path / f"{name}-hf"


@pytest.mark.parametrize(
    "step", ["checkpoints/checkpoint_3", "checkpoints/005000/pretrained_model", "checkpoints/last"]
)
def test_default_output_leaves_a_folder_of_checkpoints(tmp_path: Path, step: str) -> None:
    make_steps(tmp_path / "run/checkpoints", "001000")
    (tmp_path / "run" / step).mkdir(parents=True)
    assert default_output(tmp_path / "run" / step, "hf") == tmp_path / f"run-{step.replace('/', '-')}-hf"


def test_default_output_of_a_neighbour_of_steps_leaves_the_run(tmp_path: Path) -> None:
    make_steps(tmp_path / "run", "checkpoint-4", "final")
    assert default_output(tmp_path / "run/final", "hf") == tmp_path / "run-final-hf"
    make_steps(tmp_path / "other", "final")
    assert default_output(tmp_path / "other/final", "hf") == tmp_path / "other/final-hf"
    (tmp_path / "other/latest").write_text("final")
    assert default_output(tmp_path / "other/final", "hf") == tmp_path / "other-final-hf"


def test_default_output_of_a_relative_path_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_steps(tmp_path / "run", "checkpoint-4")
    monkeypatch.chdir(tmp_path)
    assert default_output(Path("run"), "hf") == Path("run-hf")
    assert default_output(Path("run/checkpoint-4"), "hf") == Path("run-checkpoint-4-hf")
    monkeypatch.chdir(tmp_path / "run")
    assert default_output(Path("checkpoint-4"), "hf") == Path("../run-checkpoint-4-hf")


def test_run_root_stops_at_an_ordinary_folder(tmp_path: Path) -> None:
    for outputs in ("outputs", "checkpoints"):
        make_steps(tmp_path / outputs, "run", "other-run")
        assert run_root(tmp_path / outputs / "run") == tmp_path / outputs / "run"


@pytest.mark.parametrize("name", ["checkpoint-4-hf", "checkpoint-9", "hf-step-4", "epoch=1-hf", "checkpoint-4/hf"])
def test_output_among_steps_is_refused(tmp_path: Path, name: str) -> None:
    make_steps(tmp_path / "run", "checkpoint-2", "checkpoint-4")
    with pytest.raises(UsageError) as caught:
        check_place(tmp_path / "run" / name)
    assert caught.value.code == "destination-in-run"
    assert f"-o {tmp_path}/run-{name.replace('/', '-')} writes next to the run" == caught.value.hint
    check_place(tmp_path / f"run-{name.replace('/', '-')}")  # the hint works


def test_universal_output_may_lie_next_to_its_step(tmp_path: Path) -> None:
    make_steps(tmp_path / "run", "global_step2")
    check_place(tmp_path / "run/global_step2_universal")


def test_output_in_a_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    make_steps(tmp_path / "run/checkpoints", "checkpoint_2")
    with pytest.raises(UsageError):
        check_place(tmp_path / "run/checkpoints/final")
    check_place(tmp_path / "run/final")
    check_place(tmp_path / "checkpoints/final")


def test_output_in_a_link_to_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/000100/pretrained_model").mkdir(parents=True)
    (tmp_path / "run/checkpoints/last").symlink_to("000100")
    with pytest.raises(UsageError, match="a trainer may"):
        check_place(tmp_path / "run/checkpoints/last/hf")


def test_conversions_of_several_steps_may_lie_next_to_each_other(fixtures: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        ckpt.plan(fixtures / "toy-zero1", "full").run(tmp_path / f"out/checkpoint-{step}")
        assert place_notes(tmp_path / "out/checkpoint-9") == []


def test_output_with_another_name_in_a_run_is_warned_about(tmp_path: Path) -> None:
    make_steps(tmp_path / "run", "checkpoint-2")
    check_place(tmp_path / "run/final")
    assert "may delete final" in place_notes(tmp_path / "run/final")[0]
    assert place_notes(tmp_path / "run-final") == []


def test_neighbours_of_a_folder_named_after_an_optimizer_are_not_its_run(fixtures: Path, tmp_path: Path) -> None:
    """A DeepSpeed step without `latest` does not make the folder around it a run."""
    step = next(path for path in (fixtures / "toy-zero1").iterdir() if path.is_dir())
    shutil.copytree(step, tmp_path / "other run")
    place = tmp_path / "optimizer study"
    shutil.copytree(fixtures / "trainer-plain", place)
    assert run_root(place) == place
    assert ckpt.resume(place / "checkpoint-2", world_size=2) == str(place / "checkpoint-2")


def test_hf_trainer_keeps_its_steps_and_the_conversion(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `save_total_limit=2`, transformers' own rotation sees only the run's two steps."""
    from transformers.trainer_utils import rotate_checkpoints

    shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    converted = run_ckpt("convert", "auto", "hf", "run/checkpoint-2")
    assert (converted.code, converted.out) == (0, "run-checkpoint-2-hf\n"), converted.err
    refused = run_ckpt("convert", "auto", "hf", "run/checkpoint-2", "-o", "run/checkpoint-2-hf")
    assert refused.code == 2 and "-o run-checkpoint-2-hf writes next to the run" in refused.err, refused.err
    before = sorted(os.listdir(tmp_path / "run"))
    rotate_checkpoints(str(tmp_path / "run"), save_total_limit=2)
    assert sorted(os.listdir(tmp_path / "run")) == before
    assert (tmp_path / "run-checkpoint-2-hf/model.safetensors").is_file()
    shutil.copytree(tmp_path / "run-checkpoint-2-hf", tmp_path / "run/checkpoint-2-hf")  # the old default output
    rotate_checkpoints(str(tmp_path / "run"), save_total_limit=2)
    assert not (tmp_path / "run/checkpoint-1").exists(), "the trainer counts it and deletes a step early"
