"""`ckpt/runs/selection.py`: all commands choose the same checkpoint, in every disguise."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import api
from ckpt.commands.check.checking import checkpoints_of
from ckpt.commands.merge_lora.find import open_adapter
from ckpt.commands.push import push as hub
from ckpt.commands.push.push import Push
from ckpt.commands.push.pushing import push_model
from ckpt.commands.resume.resuming import source_of
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import OWN, Checkpoint
from ckpt.runs.opening import can_resume
from ckpt.runs.steps import run_at
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES
from tests.support.sampling import sample

#: Folders to compare digests for in every disguise.
HASHED = ("toy-zero1", "dcp-fsdp2", "trainer-zero2", "verl-fsdp2", "lora-zero3", "with_by_products")
#: Fixtures with a single checkpoint or run, of each trainer and strategy; no command may read the files in `hostile`.
NAMES = sample(
    sorted(
        {path.name for path in FIXTURES.iterdir() if path.is_dir()} - {"hostile", "__pycache__"},
        key=lambda name: (name not in HASHED, name),
    ),
    lambda name: (name.partition("-")[0], next((end for end in ("fsdp1", "fsdp2", "zero3") if name.endswith(end)), "")),
)


# -- run folders from fixtures ---------------------------------------------------------------------------------------
def copied(fixture: str, place: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / fixture, place, ignore=lambda *_: {"truth"}))


def lightning_file(place: Path, step: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {"layer.weight": torch.full((2, 2), float(step))}, "global_step": step}, place)


def finished_lora(run: Path) -> None:
    """Put the final adapter into the run's folder, and an older one into a step."""
    ckpt.plan(ckpt.open(FIXTURES / "lora-zero3"), "peft").run(run)
    shutil.copytree(run, run / "checkpoint-2", ignore=lambda *_: {"checkpoint-2"})


def unfinished_lora(run: Path) -> None:
    """Make steps with shards. The newest has the adapter's file, too."""
    for step in (2, 10):
        copied("lora-zero3", run / f"checkpoint-{step}")
    written = run.with_name("adapter of a step")
    ckpt.plan(ckpt.open(FIXTURES / "lora-zero3"), "peft").run(written)
    shutil.copytree(written, run / "checkpoint-10", dirs_exist_ok=True)
    shutil.rmtree(written)


def zero3_saved_at_the_end(run: Path) -> None:
    """Put `latest` and the last step's files into the run folder, like `Trainer.save_model` under ZeRO-3."""
    copied("trainer-zero2", run)
    shutil.copytree(run / "checkpoint-2/global_step2", run / "global_step2")
    shutil.copy(run / "checkpoint-2/latest", run)


def with_by_products(run: Path) -> None:
    """Put a converted model, logs and an export among the steps."""
    copied("trainer-zero2", run)
    ckpt.plan(ckpt.open(run), "hf").run(run.with_name("exported"))
    run.with_name("exported").rename(run / "checkpoint-2-hf")
    (run / "runs").mkdir()
    (run / "runs/events.out.tfevents.1").write_bytes(b"x")
    (run / "README.md").write_text("mine")


def several_engines(run: Path) -> None:
    copied("toy-zero3", run)
    copied("dcp-fsdp2", run / "other")
    (run / "other/step-2").rename(run / "step-8")
    copied("trainer-zero2/checkpoint-1", run / "checkpoint-1")


def newest_is_incomplete(run: Path) -> None:
    copied("trainer-zero2", run)
    next((run / "checkpoint-2").rglob("*rank_1*optim_states.pt")).unlink()


def all_are_incomplete(run: Path) -> None:
    newest_is_incomplete(run)
    next((run / "checkpoint-1").rglob("*rank_0*optim_states.pt")).unlink()


def project_of_accelerate(run: Path) -> None:
    for number in (9, 10):
        copied("trainer-plain/checkpoint-2", run / f"checkpoints/checkpoint_{number}")


def files_of_lightning(run: Path) -> None:
    for epoch, step in ((0, 2), (1, 10)):
        lightning_file(run / f"lightning_logs/version_0/checkpoints/epoch={epoch}-step={step}.ckpt", step)


def two_runs(run: Path) -> None:
    copied("trainer-zero2", run / "a")
    copied("toy-zero1", run / "b")


def run_and_its_conversion(run: Path) -> None:
    copied("trainer-zero2", run / "sft")
    ckpt.plan(ckpt.open(run / "sft"), "hf").run(run / "sft-hf")


MADE: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        *(finished_lora, unfinished_lora, zero3_saved_at_the_end, with_by_products, several_engines),
        *(newest_is_incomplete, all_are_incomplete, project_of_accelerate, files_of_lightning, two_runs),
        run_and_its_conversion,
    )
}


# -- disguises -------------------------------------------------------------------------------------------------------
def scrambled(folder: Path) -> None:
    """Give every file and folder a random time."""
    draw = random.Random(folder.name)
    for path in (folder, *folder.rglob("*")):
        time = draw.randrange(10**9, 2 * 10**9)
        os.utime(path, (time, time))


def read_only(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)


DISGUISES = ("copied", "scrambled", "moved", "linked", "read-only")
CASES = (*HASHED, *sorted({*NAMES, *MADE} - {*HASHED}))
#: Disguises, and the cases that wear them. No disguise hides another, but a link hides where its folder was moved.
PARAMS = ((DISGUISES, (*dict.fromkeys((*HASHED, *MADE, *CASES[::4])),)), (("moved", "read-only"), CASES[2::4]))


@dataclass(frozen=True)
class Disguised:
    """Cases in disguise, by name in one folder."""

    folder: Path
    names: tuple[str, ...]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make all cases: the fixtures, and the run folders built from them."""
    cases = tmp_path_factory.mktemp("originals") / "cases"
    cases.mkdir()
    for name in NAMES:
        (cases / name).symlink_to(FIXTURES / name)
    for name, make in MADE.items():
        make(cases / name)
    return cases


@pytest.fixture(scope="module", params=PARAMS, ids=lambda param: " ".join(param[0]))
def disguised(
    request: pytest.FixtureRequest, originals: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disguised]:
    disguises, names = request.param
    place = tmp_path_factory.mktemp("disguised")
    cases = place / "cases"
    for name in names:  # with links inside, such as LeRobot's `last`
        case = (originals / name).resolve()
        shutil.copytree(case, cases / name, symlinks=True, copy_function=shutil.copyfile)
    if "scrambled" in disguises:
        scrambled(cases)
    if "read-only" in disguises:
        read_only(cases)
    if "moved" in disguises:
        (place / "global_step9").mkdir()  # above the folder, named like a step
        cases = cases.rename(place / "global_step9" / "runs")
    written = cases
    if "linked" in disguises:
        links = place / "links"
        links.mkdir()
        for name in os.listdir(cases):
            (links / name).symlink_to(cases / name)
        cases = links
    yield Disguised(cases, names)
    for path in written.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


# -- each command's choices ------------------------------------------------------------------------------------------
def answer(ask: Callable[[], Any], case: Path) -> Any:
    """Return an answer, or an error's class and exit code, with the case's paths replaced."""
    try:
        found = ask()
    except CkptError as error:
        found = (type(error).__name__, error.exit_code, str(error.found or ""), str(error.hint or ""))
    return clean(found, case)


def clean(found: Any, case: Path) -> Any:
    if isinstance(found, tuple | list):
        return [clean(one, case) for one in found]
    return found.replace(str(case), "CASE") if isinstance(found, str) else found


def facts(checkpoint: Checkpoint) -> tuple[Any, ...]:
    return checkpoint.path, checkpoint.format, checkpoint.state.step, list(map(str, checkpoint.notes))


def pushed(case: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder `ckpt push` would upload."""
    folders: list[Path] = []

    def upload(folder: Path, *_: Any, **__: Any) -> hub.Pushed:
        folders.append(folder)
        return hub.Pushed("org/name", "", 0, 0)

    monkeypatch.setattr(hub, "push", upload)
    push_model(case, Push("org/name", own_names=True), ["ckpt"], say=lambda _: None)
    return str(folders[0])


def choices(case: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {
        "inspect": answer(lambda: facts(ckpt.inspect(case).checkpoint), case),
        "convert": answer(lambda: facts(ckpt.open(case)), case),
        "check": answer(lambda: list(map(str, checkpoints_of(case))), case),
        "resume": answer(lambda: facts(source_of(case, None, None, False)), case),
        "merge-lora": answer(lambda: facts(open_adapter(str(case)).checkpoint), case),
        "push": answer(lambda: pushed(case, monkeypatch), case),
    }


@pytest.fixture(scope="module")
def expected(originals: Path) -> dict[str, dict[str, Any]]:
    """Return the choices for the original folders."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return {name: choices(originals / name, monkeypatch) for name in CASES}


def test_a_disguise_changes_no_choice(
    disguised: Disguised, expected: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = {
        name: (found, expected[name])
        for name in disguised.names
        if (found := choices(disguised.folder / name, monkeypatch)) != expected[name]
    }
    assert not differing


def test_a_disguise_changes_no_digest(disguised: Disguised, originals: Path) -> None:
    for name in (name for name in disguised.names if name in HASHED):
        found = [api.digests(ckpt.open(cases / name)).whole for cases in (originals, disguised.folder)]
        assert found[0] == found[1], name


def test_commands_agree_about_every_folder(originals: Path, expected: dict[str, dict[str, Any]]) -> None:
    for name, chosen in expected.items():
        assert chosen["inspect"] == chosen["convert"], name
        if not chosen["convert"][0].startswith("CASE"):
            continue
        case = originals / name
        opened, place = ckpt.open(case), Path(str(chosen["convert"][0]).replace("CASE", str(case)))
        listed = [Path(one.replace("CASE", str(case))) for one in chosen["check"]]
        assert any(place.is_relative_to(one) for one in listed), (name, "check")
        resumed = chosen["resume"]
        if can_resume(opened) and not opened.passed_over and not any("also here" in note for note in opened.notes):
            is_same = resumed[:3] == chosen["convert"][:3]
            has_equal = any(step.number == opened.state.step for step in run_at(case).steps)
            assert is_same or (has_equal and resumed[2] == opened.state.step), (name, "resume")
        adapter = chosen["merge-lora"]
        if opened.is_adapter and opened.namespace != OWN:
            assert adapter[:3] == chosen["convert"][:3], (name, "merge-lora")


def test_the_command_line_chooses_the_same(
    originals: Path, expected: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name in ("finished_lora", "with_by_products", "several_engines", "newest_is_incomplete", "two_runs"):
        case, chosen = originals / name, expected[name]["convert"]
        shown = run_ckpt("inspect", case, "--json")
        planned = run_ckpt("convert", "auto", "full", case, "-o", tmp_path / name, "--dry-run", "-v")
        hashed = run_ckpt("hash", case)
        code = 0 if chosen[0].startswith("CASE") else chosen[1]
        assert (shown.code, planned.code, hashed.code) == (code, code, code), (name, planned.err)
        if code == 0:
            assert f'"path": "{chosen[0].replace("CASE", str(case))}"' in shown.out
