"""`ckpt/runs/lost_files.py`, `ckpt/commands/check/step_files.py`: `check` and `resume` judge a step's files alike."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Result, ckpt
from tests.support.model_files import merge_json, rewriting
from tests.support.sampling import sample

HOOKS = "unet/diffusion_pytorch_model.safetensors"
BROKEN = "this step is not whole: "
NO_OPTIMIZER = "scheduler.pt is missing: HF Trainer loads no optimizer without it"


@pytest.fixture
def copied(fixtures: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        skipped = shutil.ignore_patterns("truth")
        return Path(shutil.copytree(fixtures / name, tmp_path / name, symlinks=True, ignore=skipped))

    return copy


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def both(place: Path) -> tuple[Result, Result]:
    return ckpt("check", place), ckpt("resume", place)


def next_step(step: Path) -> Path:
    """Copy a step to the number after next."""
    copy = Path(shutil.copytree(step, step.with_name(step.name.replace("2", "4"))))
    if (state := copy / "trainer_state.json").is_file():
        state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": 4}))
    return copy


UNREAD = [
    ("trainer-plain", "checkpoint-2", "generation_config.json"),
    ("trainer-zero2", "checkpoint-2", "tokenizer_config.json"),
    ("trl-zero2", "outputs/llama-sft/checkpoint-2", "tokenizer.json"),
    ("diffusers-zero2", "checkpoint-2", "unet_ema/config.json"),
    ("diffusers-zero2", "checkpoint-2", HOOKS),
    ("diffusers-fsdp2", "checkpoint-2", "pytorch_lora_weights.safetensors"),
]


def acted(files: list[Any]) -> list[Any]:
    """Return each file with an act, halved and emptied in turn, and all others."""
    acts = [
        (file, act)
        for start in ((halve, empty), (empty, halve))
        for file, act in zip(files, cycle(start), strict=False)
    ]
    return sample(acts, lambda case: case)


@pytest.mark.parametrize(("fixture", "step", "file", "act"), [(*file, act) for file, act in acted(UNREAD)])
def test_a_broken_file_that_the_trainer_itself_does_not_read(
    copied: Callable[[str], Path], fixture: str, step: str, file: str, act: Callable[[Path], None]
) -> None:
    place = copied(fixture) / step
    checked, resumed = both(place)
    assert (checked.code, resumed.code) == (0, 0) and BROKEN not in resumed.err
    act(place / file)
    checked, resumed = both(place)
    assert checked.code == 4 and f"  - {file}: " in checked.out, checked.out
    assert (resumed.code, resumed.out) == (0, f"{place}\n") and f"note: {BROKEN}{file}: " in resumed.err, resumed.err


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "2_Dense/config.json", "config.json"])
def test_sentence_transformers_needs_the_config_of_each_module(copied: Callable[[str], Path], file: str) -> None:
    step = copied("sentence-transformers") / "checkpoint-2"
    (step / file).unlink()
    checked, resumed = both(step)
    assert (checked.code, resumed.code) == (4, 4) and f"{step}/{file}" in resumed.err, (checked, resumed)
    assert f"  - {file}: missing, modules.json lists its module" in checked.out, checked.out
    resumed = ckpt("resume", step, "--world-size", "3", "--format", "zero3")
    assert resumed.code == 4 and "missing, modules.json lists its module" in resumed.err, resumed.err


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "2_Dense/config.json"])
def test_deepspeeds_engine_needs_no_config_of_a_module(copied: Callable[[str], Path], file: str) -> None:
    step = copied("sentence-transformers") / "checkpoint-2"
    converted = step.parent.with_name("converted")
    assert ckpt("convert", "auto", "zero3", step, "--world-size", "1", "-o", converted).code == 0
    assert BROKEN not in ckpt("resume", converted).err
    (converted / file).unlink()
    resumed = ckpt("resume", converted)
    assert resumed.code == 0 and f"note: {BROKEN}{file}: missing, modules.json lists its" in resumed.err, resumed.err


@pytest.mark.parametrize(
    ("file", "act"),
    acted(
        [
            *("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "tokenizer.json"),
            "config_sentence_transformers.json",
        ]
    ),
)
def test_sentence_transformers_builds_its_model_from_the_step(
    copied: Callable[[str], Path], file: str, act: Callable[[Path], None]
) -> None:
    step = copied("sentence-transformers") / "checkpoint-2"
    assert ckpt("resume", step).code == 0
    converted = step.parent.with_name("converted")
    assert ckpt("convert", "auto", "zero3", step, "--world-size", "1", "-o", converted).code == 0
    for place in (step, converted):
        act(place / file)
    checked, resumed = both(step)
    assert (checked.code, resumed.code) == (4, 4) and f"{step}/{file}" in resumed.err, resumed.err
    resumed = ckpt("resume", converted)  # DeepSpeed's engine loads a model that the script has built
    assert resumed.code == 0 and f"note: {BROKEN}{file}: " in resumed.err, resumed.err


@pytest.mark.parametrize(
    ("fixture", "file"),
    [
        ("trainer-zero2", "checkpoint-2/rng_state_1.pth"),
        ("diffusers-zero2", "checkpoint-2/random_states_1.pkl"),
        ("diffusers-fsdp2", "checkpoint-2/random_states_1.pkl"),
    ],
)
def test_the_last_rank_of_those_recorded_lacks_its_random_states(
    copied: Callable[[str], Path], fixture: str, file: str
) -> None:
    run = copied(fixture)
    checked, resumed = both(run)
    assert (checked.code, resumed.code) == (0, 0) and "random states" not in resumed.err
    assert "every part of every tensor" in checked.out, checked.out
    (run / file).unlink()
    checked, resumed = both(run)
    assert checked.code == 0 and "every part of every tensor" not in checked.out, checked.out
    assert f"{Path(file).name}: the file of rank 1 is missing: the step records 2 ranks" in checked.out, checked.out
    assert resumed.code == 0 and "no random states for rank 1: they start from fresh seeds" in resumed.err, resumed.err


def test_without_recorded_ranks_only_the_numbers_prove_random_states(copied: Callable[[str], Path]) -> None:
    step = copied("accelerate-loader") / "step_4"
    (step / "random_states_1.pkl").rename(step / "random_states_2.pkl")
    checked, resumed = both(step)
    assert checked.code == 4 and "random_states_1.pkl: the file of rank 1 is missing, rank 2's is there" in checked.out
    assert resumed.code == 0 and "no random states for rank 1" in resumed.err
    (step / "random_states_2.pkl").unlink()  # the step may be from one rank
    checked, resumed = both(step)
    assert checked.code == 0 and "random_states" not in checked.out and "random states" not in resumed.err


def test_hf_trainer_numbers_random_states_of_several_ranks_only(copied: Callable[[str], Path]) -> None:
    step = copied("trainer-plain") / "checkpoint-2"
    assert ckpt("check", step).code == 0
    (step / "rng_state.pth").rename(step / "rng_state_0.pth")
    checked = ckpt("check", step)
    assert checked.code == 4, checked.out
    assert "rng_state_1.pth: the file of rank 1 is missing: a single rank writes rng_state.pth" in checked.out


def test_a_conversion_to_more_ranks_has_no_random_states_for_them(copied: Callable[[str], Path]) -> None:
    run = copied("trainer-zero2")
    assert ckpt("convert", "auto", "zero2", run, "--world-size", "4", "-o", run.with_name("checkpoint-2")).code == 0
    assert ckpt("check", run.with_name("checkpoint-2")).code == 0


def test_hf_trainers_schedule_that_other_steps_have(copied: Callable[[str], Path]) -> None:
    run = copied("trainer-plain")
    newest = next_step(run / "checkpoint-2")
    assert [one.code for one in both(run)] == [0, 0]
    (newest / "scheduler.pt").unlink()
    checked, resumed = both(run)
    assert checked.code == 4 and "scheduler.pt: missing; the run's other steps have it" in checked.out, checked.out
    assert resumed.code == 4 and NO_OPTIMIZER in resumed.err, resumed.err
    (run / "checkpoint-2" / "scheduler.pt").unlink()  # a conversion from DeepSpeed may have none
    checked, resumed = both(run)
    assert checked.code == 0 and checked.out.count(NO_OPTIMIZER) == 2, checked.out
    assert resumed.code == 0 and f"note: {NO_OPTIMIZER}" in resumed.err, resumed.err
    (newest / "latest").write_text("global_step4")  # DeepSpeed's engine may hold it
    assert NO_OPTIMIZER not in ckpt("check", newest).out


@pytest.mark.parametrize("file", ["rng_state.pth", "config.json"])
def test_random_states_and_a_config_that_other_steps_have(copied: Callable[[str], Path], file: str) -> None:
    run = copied("trainer-plain")
    newest = next_step(run / "checkpoint-2")
    (newest / file).unlink()
    checked, resumed = both(run)
    words = f"{file}: missing; the run's other steps have it"
    assert checked.code == 4 and words in checked.out, checked.out
    assert resumed.code == 0 and f"note: {BROKEN}{words}" in resumed.err, resumed.err
    (run / "checkpoint-2" / file).unlink()  # nothing proves that the trainer writes it
    checked, resumed = both(run)
    assert checked.code == 0 and words not in checked.out + resumed.err, checked.out


def test_a_run_inside_a_step_is_not_the_step(copied: Callable[[str], Path]) -> None:
    step, inner = copied("trainer-plain") / "checkpoint-2", copied("timm")
    inner = inner.rename(step / "others")
    assert ckpt("resume", step).out == f"{step}\n"
    (step / "optimizer.pt").unlink()  # HF Trainer would start a new one
    assert ckpt("resume", step).out == f"{inner / 'last.pth.tar'}\n"


def at_step(step: Path, number: int) -> Path:
    """Return a copy whose optimizer, schedule and record are from step `number`."""
    new = Path(shutil.copytree(step, step.with_name(f"checkpoint-{number}")))
    merge_json(new / "trainer_state.json", {"global_step": number})
    with rewriting(new / "scheduler.pt") as schedule:
        schedule["last_epoch"] = number
    with rewriting(new / "optimizer.pt") as optimizer:
        for state in optimizer["state"].values():
            state["step"] = torch.tensor(float(number))
    return new


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("optimizer.pt", 0, "the model and the schedule are from step 4, but the optimizer has taken 2"),
        ("scheduler.pt", 4, "scheduler.pt is from step 2, like checkpoint-2's; the optimizer and trainer_state.json"),
    ],
)
def test_a_file_of_another_step_of_hf_trainer(copied: Callable[[str], Path], file: str, code: int, words: str) -> None:
    run = copied("trainer-plain")
    newest = at_step(run / "checkpoint-2", 4)
    checked, resumed = both(run)
    assert (checked.code, resumed.code) == (0, 0) and words not in checked.out + resumed.err, checked.out
    shutil.copy(run / "checkpoint-2" / file, newest / file)
    checked, resumed = both(run)
    assert (checked.code, resumed.code) == (code, 0), checked.out
    assert words in checked.out and words in resumed.err, (checked.out, resumed.err)


@pytest.mark.parametrize(("taken", "last"), [(3, 3), (4, 1), (4, 3)])
def test_schedules_that_may_count_something_else(copied: Callable[[str], Path], taken: int, last: int) -> None:
    """Mixed precision skips steps of both. A schedule may count epochs."""
    run = copied("trainer-plain")
    newest = at_step(run / "checkpoint-2", 4)
    with rewriting(newest / "scheduler.pt") as schedule:
        schedule["last_epoch"] = last
    with rewriting(newest / "optimizer.pt") as optimizer:
        for state in optimizer["state"].values():
            state["step"] = torch.tensor(float(taken))
    checked, resumed = both(run)
    assert (checked.code, resumed.code) == (0, 0), checked.out
    assert "from step" not in checked.out and "from step" not in resumed.err


def test_accelerates_schedules(copied: Callable[[str], Path]) -> None:
    run = copied("diffusers-fsdp2")
    newest = next_step(run / "checkpoint-2")
    for number in ("_1", "_2"):
        shutil.copy(newest / "scheduler.bin", newest / f"scheduler{number}.bin")
    assert [one.code for one in both(run)] == [0, 0]
    (newest / "scheduler.bin").unlink()
    checked, resumed = both(run)
    assert checked.code == 4 and "scheduler.bin: missing, scheduler_2.bin is there" in checked.out, checked.out
    assert resumed.code == 0 and f"{BROKEN}scheduler.bin: missing" in resumed.err, resumed.err
    for number in ("_1", "_2"):
        (newest / f"scheduler{number}.bin").unlink()
    checked, resumed = both(run)
    assert checked.code == 4 and "scheduler.bin: missing; the run's other steps have it" in checked.out, checked.out
    assert resumed.code == 0 and f"{BROKEN}scheduler.bin: missing" in resumed.err, resumed.err
    shutil.rmtree(run / "checkpoint-2")  # nothing shows that the script has a schedule
    assert [one.code for one in both(run)] == [0, 0] and "scheduler.bin" not in ckpt("check", run).out


@pytest.mark.parametrize("item", sample(("lr_scheduler", "step", "dataloader"), lambda _: ("an item",)))
def test_an_item_of_torch_checkpointing(copied: Callable[[str], Path], item: str) -> None:
    run = copied("torch-checkpointing")
    step = run / "step-3"
    (step / f"{item}_0.pt").unlink()
    for place in (run, step):
        checked, resumed = both(place)
        assert checked.code == 4 and f"{item}_0.pt: missing, {item}_1.pt is there" in checked.out, checked.out
        assert resumed.code == 4 and f"{item}_0.pt" in resumed.err, resumed.err
    (step / f"{item}_1.pt").unlink()
    checked, resumed = both(run)
    assert checked.code == 4 and f"{item}_0.pt: missing; the run's other steps have it" in checked.out, checked.out
    assert resumed.code == 0 and f"{BROKEN}{item}_0.pt: missing" in resumed.err, resumed.err
    shutil.rmtree(run / "step-2")
    assert f"{item}_0.pt" not in ckpt("check", run).out


def close(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Deny to list folders called `name`. The system call itself fails, because tests may run as root."""

    def closed(path: Any, scan: Any = os.scandir) -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)


@pytest.mark.parametrize("name", ["lost+found", ".Trash-0", "others"])
def test_a_folder_next_to_the_steps_that_cannot_be_listed(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = copied("trainer-zero2")
    (run / name).mkdir()
    assert "listed" not in ckpt("check", run).out
    close(monkeypatch, name)
    checked, resumed = both(run)
    assert checked.code == 0, checked
    assert f"- {name}: not looked into: the folder can't be listed" in checked.out, checked.out
    assert (resumed.code, resumed.out) == (0, f"{run / 'checkpoint-2'}\n"), resumed
    assert ckpt("inspect", run).code == 0
    assert ckpt("check", run.parent).code == 0


def test_a_step_that_cannot_be_listed_is_an_error(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied("trainer-zero2")
    close(monkeypatch, "checkpoint-2")
    assert ckpt("check", run).code == 7


def test_a_new_disk_holds_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    close(monkeypatch, "lost+found")
    assert ckpt("resume", tmp_path, "--missing-ok").code == 0
    assert ckpt("check", tmp_path).code == 3


def test_a_model_in_the_root_of_a_disk(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copied("sentence-transformers") / "final"
    (model / "lost+found").mkdir()
    close(monkeypatch, "lost+found")
    checked = ckpt("check", model)
    assert checked.code == 0 and "lost+found: not read: the folder can't be listed" in checked.out, checked.out
    assert ckpt("convert", "auto", "hf", model, "-o", model.with_name("out")).code == 0


def test_a_conversion_without_a_manifest_has_no_random_states_for_new_ranks(copied: Callable[[str], Path]) -> None:
    run = copied("trainer-zero2")
    out = run.with_name("out")
    assert ckpt("convert", "auto", "zero3", run, "--world-size", "4", "--no-manifest", "-o", out).code == 0
    checked, resumed = both(out)
    assert (checked.code, resumed.code) == (0, 0)
    assert "rng_state_3.pth: the file of rank 3 is missing: the step records 4 ranks" in checked.out, checked.out
