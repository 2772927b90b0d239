"""`ckpt/runs/trainer_files.py`: HF Trainer's `checkpoint-N` stays one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt import api
from ckpt.errors import UsageError
from ckpt.runs import selection
from ckpt.runs.selection import is_run
from tests.support.commands import ckpt

#: Files Trainer needs to resume, except for the model and the optimizer.
OF_THE_STEP = ("trainer_state.json", "config.json", "tokenizer_config.json", "rng_state_0.pth", "rng_state_1.pth")


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    """Make a run folder from two ranks. A script has also left the state of its last step there."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    (run / "trainer_state.json").write_text('{"global_step": 1000}')
    (run / "checkpoint-2" / "scheduler.pt").write_bytes(b"the schedule")
    return run


@pytest.mark.parametrize(
    "ways",
    [("dcp", "zero3"), ("dcp", "full", "dcp"), ("full", "zero1"), ("full", "full"), ("zero3", "universal", "zero2")],
    ids=" ".join,
)
def test_a_step_stays_one(run: Path, ways: tuple[str, ...]) -> None:
    step, at, source = run / "checkpoint-2", run, "zero2"
    for way in ways:
        output = run.with_name(f"{at.name}-{way}") / "checkpoint-2"
        ranks = ("--world-size", "2") if source == "full" else ()
        result = ckpt("convert", source, way, at, "-o", output, *ranks)
        assert result.code == 0, result.err
        assert f"trainer.train(resume_from_checkpoint='{output}')" in result.err
        for name in (*OF_THE_STEP, "scheduler.pt"):
            assert (output / name).read_bytes() == (step / name).read_bytes(), (way, name)
        at, source = output.parent, way
        assert api.open(at, source).state.step == 2


def test_a_step_without_its_schedule_is_said_to_be(run: Path) -> None:
    """Under FSDP, Trainer loads the optimizer only if there is a `scheduler.pt`."""
    (run / "checkpoint-2" / "scheduler.pt").unlink()
    for way in ("dcp", "full"):
        assert "no scheduler.pt" in ckpt("convert", "zero2", way, run, "-o", run.with_name(way)).err


def test_weights_alone_are_no_step_to_go_on_from(run: Path) -> None:
    """Trainer would continue from its step with an empty optimizer."""
    result = ckpt("convert", "zero2", "hf", run)
    assert "resume_from_checkpoint" not in result.err
    weights = run / "checkpoint-3"
    shutil.move(run.with_name("run-hf"), weights)
    shutil.copy(run / "checkpoint-2" / "trainer_state.json", weights)
    for way in ("zero3", "dcp", "full"):
        result = ckpt("convert", "hf", way, weights, "--world-size", "2", "-o", run.with_name(way))
        assert result.code == 0, result.err
        assert "resume_from_checkpoint" not in result.err
        assert "not written: files of the run trainer_state.json" in result.err
        assert not (run.with_name(way) / "trainer_state.json").exists()


def test_all_random_states_are_kept_where_no_number_of_ranks_is_given(run: Path) -> None:
    full = ckpt("convert", "zero2", "full", run, "-o", run.with_name("full"))
    assert "random states" not in full.err
    one = ckpt("convert", "full", "full", run.with_name("full"), "-o", run.with_name("one"), "--world-size", "1")
    assert "random states of rank 1" in one.err
    assert (run.with_name("one") / "rng_state.pth").read_bytes() == (
        run / "checkpoint-2" / "rng_state_0.pth"
    ).read_bytes()


def test_a_tag_names_a_step_inside_of_a_checkpoint_folder(run: Path) -> None:
    """This also holds without a `latest` record, and if the run folder has its own steps."""
    (run / "checkpoint-2" / "latest").unlink()
    for own in (False, True):
        if own:
            shutil.copytree(run / "checkpoint-1" / "global_step1", run / "global_step0")
        for tag in ("global_step2", "checkpoint-1", "checkpoint-1/global_step1"):
            step = run / tag if "/" in tag else next(run.glob(f"*/{tag}"), run / tag / "global_step1")
            assert Path(api.open(run, tag=tag).path) == step
    missing = ckpt("inspect", run, "--tag", "global_step9")
    assert missing.code == 3 and "hint: --tag global_step0" in missing.err


def test_later_steps_than_that_of_the_run_folder_are_named(run: Path) -> None:
    """Training continued from a conversion in the same folder, and `latest` there still records the old step."""
    shutil.copytree(run / "checkpoint-1" / "global_step1", run / "global_step1")
    (run / "latest").write_text("global_step1")
    notes = api.open(run).notes
    assert notes == ("taking global_step1", "later than the selected step: checkpoint-2 (tag takes it)")


def test_what_was_read_is_no_file_left_behind(run: Path) -> None:
    """Nor does a weights target list the optimizer as left out."""
    whole = run.with_name("whole")
    assert ckpt("convert", "zero2", "full", run, "-o", whole).code == 0
    (whole / "trainer_state.json").unlink()
    for way in ("zero3", "dcp", "full", "hf"):
        ranks = ("--world-size", "2") if way == "zero3" else ()
        result = ckpt("convert", "full", way, whole, "--dry-run", *ranks)
        assert result.code == 0
        assert not [line for line in result.out.splitlines() if "not written" in line and "optimizer.bin" in line]
    assert "not written: optimizer states" in result.out


def test_models_beside_the_steps_are_named(fixtures: Path, tmp_path: Path) -> None:
    """A run may hold a final model, an average or another run. Copies of steps and results of ckpt are no news."""
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-plain/checkpoint-2", run / "checkpoint-2")
    for name in ("final", "ema", "checkpoint-2-merged", ".hidden", "runB/checkpoint-9"):
        shutil.copytree(run / "checkpoint-2", run / name)
    (run / "logs").mkdir()
    (run / "best").symlink_to("checkpoint-2")
    told = "also here, not a step: ema, final, runB (tag takes it)"
    assert told in api.open(run).notes
    assert f"note: {told.replace('tag', '--tag')}" in ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out").err
    assert Path(api.open(run, tag="final").path) == run / "final"
    assert all("also here" not in note for note in api.open(run, tag="checkpoint-2").notes)
    assert all("also here" not in note for note in api.open(run / "checkpoint-2").notes)


def test_folder_of_logs_next_to_steps_loads_no_format(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, searched = tmp_path / "run", []
    shutil.copytree(fixtures / "trainer-plain/checkpoint-2", run / "checkpoint-2")
    for name in ("logs/train.log", "runs/a/events.out.tfevents.1", "wandb/b/wandb-summary.json", "wandb/b/config.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("1")
    (run / "wandb/latest-run").symlink_to("b")
    (run / "other").mkdir()
    (run / "other/latest").write_text("global_step1")
    monkeypatch.setattr(selection, "is_run", lambda path, *rest: searched.append(path.name) or is_run(path, *rest))
    assert "also here, not a step: other (tag takes it)" in api.open(run).notes
    assert "other" in searched and not {"logs", "runs", "wandb"} & {*searched}


def test_a_folder_with_a_link_to_a_step_is_named(fixtures: Path, tmp_path: Path) -> None:
    step, run = fixtures / "trainer-plain/checkpoint-2", tmp_path / "run"
    shutil.copytree(step, run / "checkpoint-2")
    (run / "other").mkdir()
    (run / "other/checkpoint-2").symlink_to(step)
    assert "also here, not a step: other (tag takes it)" in api.open(run).notes


def test_a_last_checkpoint_without_a_number_is_compared(fixtures: Path, tmp_path: Path) -> None:
    step, run = fixtures / "trainer-plain/checkpoint-2", tmp_path / "run"
    for name in ("checkpoint-1", "checkpoint-last"):
        shutil.copytree(step, run / name)
    (run / "checkpoint-1/trainer_state.json").write_text('{"global_step": 1}')
    (run / "checkpoint-1/optimizer.pt").unlink()
    assert Path(api.open(run).path) == run / "checkpoint-last"
    for name in ("trainer_state.json", "optimizer.pt"):
        (run / "checkpoint-last" / name).unlink()
    with pytest.raises(UsageError, match="ambiguous"):
        api.open(run)


def test_checkpoints_beside_a_finished_runs_model_are_named(fixtures: Path) -> None:
    """A finished run exports its model into the run folder, without optimizer and step."""
    run = fixtures / "axolotl-fsdp2/outputs/gpt-oss-out"
    checkpoint = api.open(run)
    assert checkpoint.format == "hf" and checkpoint.state.step is None
    told = "using the folder's own model; also here: checkpoint-2 (tag takes it)"
    assert told in checkpoint.notes
    assert told.replace("tag", "--tag") in ckpt("inspect", run).err + ckpt("inspect", run).out
    assert all("also here" not in note for note in api.open(run, tag="checkpoint-2").notes)
