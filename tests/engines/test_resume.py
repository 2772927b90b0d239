"""`ckpt/commands/resume/resuming.py`: runs stop midway, get converted and resume in a live engine.

The data doesn't depend on the number of ranks. The loss equals the unbroken run's bit for bit if engine and ranks stay,
or if the framework reshards by itself. Otherwise only the order of sums differs, within a bound for rounding. Column
`apart` shows the difference between unbroken runs. A run that forgets its optimizer is far outside the bound.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Layout
from tests.support.commands import ckpt
from tests.support.engines import launch_in_turn
from tests.support.pages import row_differs
from tests.support.places import REPOSITORY
from tests.support.resuming import BOUNDS, Row, Run, apart, format_of, losses, options, shown, side_by_side, title
from tests.support.sampling import sample

pytestmark = pytest.mark.slow

RECORDED = (REPOSITORY / "docs" / "losses.txt").read_text()


def row(source: tuple[str, int], target: tuple[str, int], *through: str, **more: Any) -> Row:
    return Row(Run(*source), Run(*target), through, **more)


TORCH = (("scheduler", "torch"),)
OTHERS = [
    Row(Run("zero3", 2, options=TORCH), Run("fsdp2", 3, options=TORCH)),
    Row(Run("fsdp2", 2, options=TORCH), Run("zero2", 3, options=TORCH)),
]
UNIVERSAL = {"checkpoint": {"load_universal": True}}
BY_HAND = [
    row(("zero3", 4), ("zero3", 4), "zero3", equal=True),
    row(("fsdp2", 2), ("fsdp2", 2), "zero3", "full", "dcp", equal=True),
    row(("zero3", 3), ("zero3", 3), "dcp", "zero3", equal=True),
    row(("zero1", 3), ("zero1", 2), "universal", load=UNIVERSAL),
    row(("ddp", 2), ("fsdp2", 3), "dcp", own={}),
    row(("fsdp2", 4), ("fsdp2", 2), "dcp", own={}),
    row(("zero1", 3), ("zero1", 3), "zero1", equal=True),
    row(("fsdp2", 4), ("fsdp2", 4), "dcp", equal=True),
    row(("zero1", 3), ("zero2", 4), "zero2"),
    row(("zero3", 3), ("zero1", 2), "zero1"),
]
#: Moves done by ckpt.resume.
UNFIT = [
    row(("zero3", 4), ("zero3", 2)),
    row(("zero3", 2), ("fsdp2", 2)),
    row(("fsdp2", 2), ("zero3", 3)),
    row(("ddp", 2), ("zero3", 3)),
    row(("zero3", 2), ("ddp", 2)),
    row(("zero3", 2), ("zero3", 3)),
    row(("zero2", 2), ("zero3", 2)),
    row(("fsdp2", 4), ("zero1", 2)),
]
FORGETFUL = Row(Run("zero3", 4, "fp32"), Run("zero3", 2, "fp32"), ("nothing but weights",))


def in_fp32(one: Row) -> Row:
    return replace(one, source=replace(one.source, dtype="fp32"), target=replace(one.target, dtype="fp32"))


def facets(one: Row) -> Iterator[object]:
    """Yield the formats that a row reads and writes, its engines and its options."""
    way = [one.source.format, *(one.through or (one.target.format,))]
    formats = [re.sub(r"\d", "", format) for format in way]
    how = bool(one.through), one.source.options
    yield from (("from", format, how) for format in formats[:-1])
    yield from (("to", format, how) for format in formats[1:])
    yield from (("source", one.source.strategy), ("target", one.target.strategy))
    yield one.source.dtype, len({re.sub(r"\d", "", run.format) for run in (one.source, one.target)})
    yield from (("own", one.own is None), ("equal", one.equal))


IN_FP32 = [*UNFIT, row(("fsdp2", 4), ("fsdp2", 2), "dcp", own={})]
ALL_ROWS = [*OTHERS, *BY_HAND, *UNFIT, *map(in_fp32, IN_FP32)]
TABLE = sample(ALL_ROWS, facets)


@pytest.fixture(scope="session")
def unbroken_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every engine in one launch, unbroken over 8 steps, with a checkpoint after 4."""
    folder = tmp_path_factory.mktemp("resume")
    jobs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    runs = {run for one in TABLE for run in (one.source, one.target)}
    for run in sorted(runs, key=lambda run: run.folder):
        jobs[run.ranks].append(run.job(folder / "unbroken" / run.folder, 8, save_every=4, save_at=4))
    launch_in_turn(sorted(jobs.items()), folder, module="tests.support.recorded_runs")
    return folder


@pytest.fixture(scope="session")
def resumed(unbroken_runs: Path) -> Path:
    """Do every conversion, and resume all runs in one launch."""
    jobs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in [*TABLE, FORGETFUL]:
        home = unbroken_runs / one.folder
        checkpoint = home / "a run"
        shutil.copytree(unbroken_runs / "unbroken" / one.source.folder, checkpoint)
        job = one.target.job(home / "goes-on", 4, save_at=0)
        if one is FORGETFUL:
            forget(checkpoint, home / "converted")
        elif one.through:
            convert(one, checkpoint, home)
        if one.through:
            job["resume"] = str(home / "converted")
        else:
            job["anywhere"] = {"path": str(checkpoint), "format": one.target.format}
            if one.target.format.startswith("zero"):
                job["anywhere"]["dtype"] = one.target.dtype
        if one.load:
            (home / "load.json").write_text(json.dumps(one.load))
            job["ds_config"] = str(home / "load.json")
        jobs[one.target.ranks].append(job)
        if one.own is not None:
            again = job | one.own | {"resume": str(checkpoint), "output": str(home / "own")}
            jobs[one.target.ranks].append(again)
    launch_in_turn(sorted(jobs.items()), unbroken_runs, module="tests.support.resume_worker")
    return unbroken_runs


def convert(one: Row, checkpoint: Path, home: Path) -> None:
    """Convert through all formats to `converted`."""
    source = format_of(one.source.strategy)
    for left, target in zip(reversed(range(len(one.through))), one.through, strict=True):
        output = home / (f"converted-{left}" if left else "converted")
        options = ["--dtype", one.target.dtype] if target.startswith("zero") and source in ("dcp", "full") else []
        if target not in ("full", "universal"):
            options += ["--world-size", str(one.target.ranks)]
        done = ckpt("convert", source, target, checkpoint, "-o", output, *options)
        assert done.code == 0, done.err
        source, checkpoint = target, output


def forget(run: Path, output: Path) -> None:
    """Write the same masters for fewer ranks, without optimizer states."""
    checkpoint = api.open(run)
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[1] in (WEIGHT, MASTER, BUFFER)}
    bare = replace(checkpoint, tensors=tensors, state=replace(checkpoint.state, scalars={}))
    api.plan(bare, "zero3", Layout(world_size=FORGETFUL.target.ranks)).run(output)


@cache
def unbroken(folder: Path, run: Run) -> dict[int, float]:
    return losses(folder / "unbroken" / run.folder)


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.folder)
def test_training_goes_on(one: Row, resumed: Path, tables: Any) -> None:
    whole, rest = unbroken(resumed, one.source), losses(resumed / one.folder / "goes-on")
    assert sorted(rest) == [5, 6, 7, 8]
    difference = apart(rest, whole)
    cells = tables[title(one.source.dtype)][one.name]
    cells |= side_by_side(rest, whole)
    cells["apart"] = shown(apart(unbroken(resumed, one.target), whole))
    if one.equal:
        assert difference == 0
    assert difference < BOUNDS[one.source.dtype]
    if one.own is not None:
        own = losses(resumed / one.folder / "own")
        cells["without conversion"] = shown(apart(rest, own))
        assert rest == own
    assert not (different := row_differs(RECORDED, one.name, cells)), different


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.folder)
def test_every_step_has_the_hyperparameters_of_the_unbroken_run(one: Row, resumed: Path) -> None:
    """The schedule continues, so the learning rate of each step matches."""
    whole = options(resumed / "unbroken" / one.source.folder)
    assert options(resumed / one.folder / "goes-on") == whole[4:]
    assert len({json.dumps(groups) for groups in whole}) > 4, "the learning rate does not change"


def test_forgetting_the_optimizer_shows(resumed: Path, tables: Any) -> None:
    """The bounds would catch a lost state."""
    whole, rest = unbroken(resumed, FORGETFUL.source), losses(resumed / FORGETFUL.folder / "goes-on")
    difference = apart(rest, whole)
    name = f"{FORGETFUL.name}, without the optimizer's states"
    cells = tables[title("fp32")][name]
    cells |= side_by_side(rest, whole)
    assert not (different := row_differs(RECORDED, name, cells)), different
    assert difference > 5 * max(BOUNDS.values())
