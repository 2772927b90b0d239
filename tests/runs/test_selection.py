"""`ckpt/runs/selection.py`: a folder's checkpoint is chosen by step numbers, never by file times."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.commands.merge_lora.find import open_adapter
from ckpt.errors import CorruptError, UsageError
from tests.support.commands import ckpt as run_ckpt


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    """Copy two HF Trainer steps under ZeRO-2."""
    return Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run", ignore=lambda *_: {"truth"}))


def model_file(path: Path, step: int | None = None, value: float = 1.0) -> Path:
    """Write a torch file like Lightning, with its step number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"state_dict": {"layer.weight": torch.full((2, 2), value)}}
    torch.save(content if step is None else {**content, "global_step": step}, path)
    return path


def test_resume_takes_the_step_with_the_trainers_files_at_equal_numbers(run: Path) -> None:
    """`Trainer.save_model` under ZeRO-3 leaves `latest` and the last step's files in the run's folder."""
    shutil.copytree(run / "checkpoint-2/global_step2", run / "global_step2")
    shutil.copy(run / "checkpoint-2/latest", run)
    assert ckpt.resume(run) == str(run / "checkpoint-2")
    shutil.copytree(run / "global_step2", run / "global_step4")
    (run / "latest").write_text("global_step4")
    assert ckpt.resume(run) == str(run), "a newer step comes first"
    (run / "latest").write_text("global_step2")
    shutil.rmtree(run / "global_step4")
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    assert ckpt.resume(run) == str(run), "the run's folder has the trainer's files, too"


@pytest.mark.parametrize("other", ["checkpoint_2", "checkpoint-02"])
def test_two_steps_of_one_number_are_named(other: str, fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-plain" / "checkpoint-2", run / "checkpoint-2")
    assert not any("also of step" in note for note in ckpt.open(run).notes)
    shutil.copytree(run / "checkpoint-2", run / other)
    left = {"checkpoint-2", other} - {Path(ckpt.open(run).path).name}
    told = f"also of step 2: {left.pop()} (--tag takes it)"
    assert told in run_ckpt("convert", "auto", "full", run, "-o", tmp_path / "out").err
    assert told in run_ckpt("resume", run).err
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-4")
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4}')
    assert "also of step" not in run_ckpt("resume", run).err


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_every_step_is_named_with_its_reason_if_all_are_damaged(run: Path, damage: str) -> None:
    for number, step in enumerate(("checkpoint-1", "checkpoint-2")):
        file = next((run / step).rglob("*rank_1*optim_states.pt"))
        if damage == "missing" or number:
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[400] ^= 1
            file.write_bytes(content)
    for command in (("resume", run), ("convert", "auto", "hf", run, "-o", run.with_name("out"))):
        result = run_ckpt(*command)
        assert result.code == 4 and "no other step can be used" in result.err and f"`ckpt check {run}`" in result.err
        assert "checkpoint-2" in result.err and "checkpoint-1" in result.err, result.err
        assert "--tag" not in result.err, "no step would open"


def test_a_hint_names_only_a_step_that_opens(run: Path) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-4")
    for step, optimizer in (("checkpoint-4", "*rank_0*optim_states.pt"), ("checkpoint-2", "*rank_1*optim_states.pt")):
        file = next((run / step).rglob(optimizer))
        content = bytearray(file.read_bytes())
        content[400] ^= 1
        file.write_bytes(content)
    with pytest.raises(CorruptError) as caught:
        ckpt.open(run)
    assert "--tag checkpoint-1 takes the checkpoint before checkpoint-4" in str(caught.value.hint)


def test_merge_lora_takes_the_adapter_that_other_commands_take(fixtures: Path, tmp_path: Path) -> None:
    run, older = tmp_path / "run", tmp_path / "run/checkpoint-2"
    ckpt.plan(ckpt.open(fixtures / "lora-zero3"), "peft").run(run)
    shutil.copytree(run, tmp_path / "older")
    (tmp_path / "older").rename(older)
    for times in ((1, 2), (2, 1)):
        for place, time in zip((run, older), times, strict=True):
            for file in place.glob("*"):
                os.utime(file, (time * 10**9, time * 10**9))
        adapter = open_adapter(str(run))
        assert adapter.path == str(run) and adapter.folder == run
        assert adapter.checkpoint.path == ckpt.open(run).path == str(run)
        assert adapter.notes == ckpt.open(run).notes
        assert any("also here: checkpoint-2 (tag takes it)" in note for note in adapter.notes)
        assert open_adapter(str(run), tag="checkpoint-2").checkpoint.path == str(older)


LAYOUTS = {
    "Accelerate": ("checkpoints/checkpoint_3/model.safetensors", "checkpoints/checkpoint_12/model.safetensors"),
    "OLMo-core": ("step1000/model_and_optim/model.safetensors", "step2000/model_and_optim/model.safetensors"),
    "prime-rl": ("checkpoints/step_9/trainer/model.safetensors", "checkpoints/step_10/trainer/model.safetensors"),
    "LeRobot": (
        "checkpoints/005000/pretrained_model/model.safetensors",
        "checkpoints/010000/pretrained_model/model.safetensors",
    ),
    "NeMo-RL": ("step_5/policy/weights/model.safetensors", "step_50/policy/weights/model.safetensors"),
    "Automodel": ("epoch_0_step_5/model/model.safetensors", "epoch_0_step_10/model/model.safetensors"),
    "Lightning": ("version_0/checkpoints/epoch=0-step=2.ckpt", "version_0/checkpoints/epoch=1-step=10.ckpt"),
    "Lightning's folder": ("epoch=0-step=2.ckpt/model.pt", "epoch=1-step=10.ckpt/model.pt"),
    "timm": ("vit/checkpoint-2.pth.tar", "vit/checkpoint-10.pth.tar"),
    "a script": ("model/step_5.pt", "model/step_10.pt"),
    "own folder": (
        "runs/a/step_5/weights_of_mine/model.safetensors",
        "runs/a/step_10/weights_of_mine/model.safetensors",
    ),
}


@pytest.mark.parametrize("trainer", LAYOUTS)
def test_steps_of_every_trainer_are_found(trainer: str, tmp_path: Path) -> None:
    for place in (files := [tmp_path / name for name in LAYOUTS[trainer]]):
        if place.suffix == ".safetensors":
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({"layer.weight": torch.ones(2, 2)}, place)
        else:
            model_file(place)
    for name in ("training_state", "train", "optim"):  # next to the model, and no model
        (files[1].parent.with_name(name)).mkdir(exist_ok=True)
    assert Path(ckpt.open(tmp_path).path) in (files[1], files[1].parent)
    report = ckpt.check(tmp_path)
    assert len(report.checkpoints) == 2 and all(one.format for one in report.checkpoints)


def test_epochs_and_steps_are_not_compared(tmp_path: Path) -> None:
    for name in ("epoch_1", "step_50"):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": torch.ones(2, 2)}, tmp_path / name / "model.safetensors")
    with pytest.raises(UsageError, match="nothing records the newest") as caught:
        ckpt.open(tmp_path)
    hints = [shlex.split(hint) for hint in str(caught.value.hint).split(" or ")]
    assert [words[0] for words in hints] == ["--tag", "--tag"]
    assert {Path(ckpt.open(tmp_path, tag=words[1]).path).name for words in hints} == {"epoch_1", "step_50"}


def test_resume_asks_if_the_folders_own_step_is_unknown(run: Path, tmp_path: Path) -> None:
    """The folder has a full state dict with an optimizer but no step number, next to numbered steps."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    torch.save({"model": {"weight": parameter.data}, "optimizer": optimizer.state_dict()}, run / "model.pt")
    assert ckpt.open(run).optimizer_states
    with pytest.raises(UsageError, match="nothing records the newest") as caught:
        ckpt.resume(run)
    for words in (shlex.split(hint) for hint in str(caught.value.hint).split(" or ")):
        assert ckpt.open(run, tag=words[1]).optimizer_states


def test_lightnings_last_is_taken_if_its_step_is_newer(tmp_path: Path) -> None:
    """`save_top_k` keeps the best steps by name, and `save_last` the newest without a number."""
    best, last = (tmp_path / "checkpoints" / name for name in ("epoch=0-step=20.ckpt", "last.ckpt"))
    model_file(best, 20)
    for step, expected in ((30, last), (20, best), (10, best)):
        model_file(last, step)
        assert Path(ckpt.open(tmp_path).path) == expected
        assert {Path(one.path).name for one in ckpt.check(tmp_path).checkpoints} == {best.name, last.name}
    model_file(last)
    with pytest.raises(UsageError) as caught:
        ckpt.open(tmp_path)
    for words in (shlex.split(hint) for hint in str(caught.value.hint).split(" or ")):
        assert Path(ckpt.open(tmp_path, tag=words[1]).path) in (best, last)
    last.unlink()
    last.symlink_to(best)
    assert Path(ckpt.open(tmp_path).path) == best


@pytest.mark.parametrize(("name", "last"), [("lightning", "checkpoints/last.ckpt"), ("timm", "last.pth.tar")])
def test_last_is_taken_by_its_recorded_step_or_epoch(fixtures: Path, tmp_path: Path, name: str, last: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    os.utime(run / last, (0, 0))
    assert ckpt.resume(run) == str(run / last)
    ckpt.convert(run, "hf", tmp_path / "out")
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), load_file(run / "truth" / "last.safetensors")
    assert found.keys() == truth.keys() and all(torch.equal(found[fqn], truth[fqn]) for fqn in truth)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def add(path: Path) -> None:
    torch.save({"more": torch.ones(2)}, path)


def older(path: Path) -> None:
    shutil.copy(path.with_name("checkpoint-1.pth.tar"), path)


@pytest.mark.parametrize(
    ("name", "file", "act", "code", "newest"),
    [
        ("lightning", "checkpoints/last.ckpt/.metadata", Path.unlink, 4, "checkpoints/epoch=0-step=4.ckpt"),
        ("lightning", "checkpoints/last.ckpt/__1_0.distcp", Path.unlink, 4, ""),
        ("lightning", "checkpoints/last.ckpt/more.pt", add, 4, "checkpoints/last.ckpt"),
        ("lightning", "checkpoints/last.ckpt/meta.pt", Path.unlink, 4, "checkpoints/epoch=0-step=4.ckpt"),
        ("timm", "last.pth.tar", halve, 4, "checkpoint-2.pth.tar"),
        ("timm", "last.pth.tar", older, 0, "checkpoint-2.pth.tar"),
        ("timm", "model_best.pth.tar", halve, 4, "last.pth.tar"),
    ],
)
def test_a_broken_last_is_named(
    fixtures: Path, tmp_path: Path, name: str, file: str, act: Callable[[Path], object], code: int, newest: str
) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    act(run / file)
    report = ckpt.check(run)
    assert report.exit_code == code
    with nullcontext() if newest else pytest.raises(CorruptError, match="a data file is missing"):
        assert ckpt.resume(run) == str(run / newest)


@pytest.mark.parametrize(("of_last", "taken"), [(60, "epoch=10.ckpt"), (120, "last.ckpt")])
def test_last_is_compared_by_steps_if_names_count_epochs(tmp_path: Path, of_last: int, taken: str) -> None:
    model_file(tmp_path / "checkpoints" / "epoch=10.ckpt", 110)
    model_file(tmp_path / "checkpoints" / "last.ckpt", of_last)
    assert ckpt.open(tmp_path).path == str(tmp_path / "checkpoints" / taken)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_run_of_last_files_comes_before_a_model_below(tmp_path: Path, place: str) -> None:
    """Lightning with save_top_k=0. A second run in the folder writes last-v1."""
    model_file(tmp_path / place / "last.ckpt", 60)
    (tmp_path / "export").mkdir()
    save_file({"layer.weight": torch.zeros(2, 2)}, tmp_path / "export/model.safetensors")
    assert run_ckpt("inspect", tmp_path).out.split()[1] == str(tmp_path / place / "last.ckpt")
    model_file(tmp_path / place / "last-v1.ckpt", 90)
    model_file(tmp_path / place / "best.ckpt", 30)
    assert ckpt.open(tmp_path).path == str(tmp_path / place / "last-v1.ckpt")
    (tmp_path / place / "last-v1.ckpt").write_bytes(b"PK")
    assert any("last-v1.ckpt is skipped, it holds no checkpoint" in note for note in ckpt.open(tmp_path).notes)


def test_steps_of_lightnings_fsdp_are_one_run(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "lightning_logs/version_0/checkpoints"
    for name in ("epoch=0-step=2.ckpt", "epoch=1-step=10.ckpt"):
        shutil.copytree(fixtures / "dcp-fsdp2/step-2", run / name)
        torch.save({}, run / name / "meta.pt")
    assert Path(ckpt.open(tmp_path).path).name == "epoch=1-step=10.ckpt"
    assert [one.format for one in ckpt.check(tmp_path).checkpoints] == ["dcp", "dcp"]
    assert ckpt.resume(tmp_path) == str(run / "epoch=1-step=10.ckpt")


def test_a_number_is_a_tag_in_python(run: Path) -> None:
    assert ckpt.open(run, tag="1").path == str(run / "checkpoint-1/global_step1")


@pytest.mark.parametrize("record", ["latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt"])
def test_a_record_names_the_step_whatever_its_format(record: str, fixtures: Path, tmp_path: Path) -> None:
    """Records of slime and SkyRL name DCP steps; a newer step may be unfinished although its files are there."""
    name = "iter_{:07d}" if "iteration" in record else "global_step_{}"
    for number in (2, 5, 8):
        shutil.copytree(fixtures / "dcp-fsdp2/step-2", tmp_path / name.format(number))
    (tmp_path / record).write_text("5")
    opened = ckpt.open(tmp_path)
    assert Path(opened.path).name == name.format(5) and ckpt.resume(tmp_path) == opened.path
    assert f"is recorded in `{record}`; there is also {name.format(8)} (tag takes it)" in " ".join(opened.notes)
    assert ckpt.open(tmp_path, tag="8").path == str(tmp_path / name.format(8))


def test_a_record_of_another_name_keeps_newer_steps_out(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero3", tmp_path / "run", ignore=lambda *_: {"truth"}))
    shutil.copytree(run / "global_step2", run / "best")
    shutil.copytree(run / "global_step2", run / "global_step4")
    (run / "latest").write_text("best")
    assert ckpt.open(run).path == str(run / "best") and ckpt.resume(run) == str(run)


def test_an_average_of_the_weights_is_named(tmp_path: Path) -> None:
    for name in ("epoch=0-step=2.ckpt", "epoch=0-step=2-EMA.ckpt", "epoch=0-step=1.ckpt"):
        model_file(tmp_path / name, 2, float(len(name)))
    opened = ckpt.open(tmp_path)
    assert Path(opened.path).name == "epoch=0-step=2.ckpt"
    note = "there is also the average epoch=0-step=2-EMA.ckpt (tag takes it)"
    assert note in opened.notes and note in opened.passed_over
    assert ckpt.open(tmp_path, tag="epoch=0-step=2-EMA.ckpt").path == str(tmp_path / "epoch=0-step=2-EMA.ckpt")


def test_a_final_model_with_the_trainers_record_has_a_number(run: Path) -> None:
    """Training after the final save leaves newer steps next to the final model."""
    ckpt.plan(ckpt.open(run), "hf").run(run.with_name("final"))
    for file in run.with_name("final").iterdir():
        file.rename(run / file.name)
    for number, text in ((1, "later than the selected step: checkpoint-2 (tag takes it)"), (2, None)):
        (run / "trainer_state.json").write_text(json.dumps({"global_step": number}))
        opened = ckpt.open(run)
        assert opened.path == str(run) and opened.format == "hf"
        assert opened.passed_over == ((text,) if text else ())
