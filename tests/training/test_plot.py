"""`ckpt/commands/plot/curves.py`: several runs' losses in one plot, from trainers' records."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ckpt.commands.plot.curves import Axes, Start, draw, furthest, losses_of, starts_of, ticks
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

SVG = "{http://www.w3.org/2000/svg}"


def recorded(run: Path, *starts: tuple[int, dict[int, float]]) -> Path:
    """Write a run's metrics.jsonl. `starts` are rank counts with their losses by step."""
    run.mkdir()
    lines = [
        {"step": step, "loss": loss, "ranks": {"loss": [loss] * ranks}}
        for ranks, losses in starts
        for step, loss in losses.items()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_run_is_told_apart_by_its_starts(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", (4, {1: 5.0, 2: 4.0, 3: 3.5}), (4, {3: 3.5, 4: 3.0}), (2, {5: 2.5}))
    starts = starts_of(run)
    assert [(one.ranks, [*one.losses]) for one in starts] == [(4, [1, 2, 3]), (4, [3, 4]), (2, [5])]
    assert losses_of(starts) == {1: 5.0, 2: 4.0, 3: 3.5, 4: 3.0, 5: 2.5}


def test_hf_trainers_own_record_is_read() -> None:
    run = FIXTURES / "trl-zero3/outputs/qwen3-sft"
    log = json.loads((run / "checkpoint-2/trainer_state.json").read_text())["log_history"]
    found = losses_of(starts_of(run))
    assert found == {entry["step"]: entry["loss"] for entry in log if "loss" in entry} and len(found) == 2


def test_curves_have_the_places_of_their_losses(tmp_path: Path) -> None:
    starts = {
        "one": [Start(4, {1: 5.0, 2: 4.0, 3: 3.0})],
        "two": [Start(4, {1: 5.0}), Start(2, {2: 4.5, 3: float("nan")})],
    }
    root = ET.fromstring(draw(starts))
    curves = [one.get("d", "") for one in root.iter(f"{SVG}path") if one.get("class") == "run"]
    axes = Axes.of([one for run in starts.values() for one in run])
    assert curves[0] == f"M{axes.at(1, 5.0)}L{axes.at(2, 4.0)}L{axes.at(3, 3.0)}"
    assert curves[1:] == [f"M{axes.at(1, 5.0)}", f"M{axes.at(2, 4.5)}"], "no line to what is no number"
    places = [tuple(map(float, axes.at(step, loss).split())) for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0))]
    assert places[1][0] * 2 == pytest.approx(places[0][0] + places[2][0])
    assert places[1][1] * 2 == pytest.approx(places[0][1] + places[2][1]) and places[0][1] < places[2][1]
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert "one: 4 ranks" in texts and "two: 4, then 2 ranks" in texts and "2 ranks" in texts
    assert [one.text for one in root.iter(f"{SVG}title")][1:] == ["resumed at step 2"]


def test_it_says_how_far_apart_they_are(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", (4, {1: 5.0, 2: 4.0, 3: 3.0}))
    two = recorded(tmp_path / "<two>", (4, {1: 5.0}), (2, {2: 4.0004, 3: 3.0, 4: 2.0}))
    assert furthest(losses_of(starts_of(one)), losses_of(starts_of(two))) == (3, 2, pytest.approx(1e-4))
    done = ckpt("plot", one, two, one, "-o", tmp_path / "loss.svg")
    assert done.code == 0
    printed = done.out.splitlines()
    assert printed[0] == f"{two}: 3 steps in common with {one}, furthest apart in step 2, by 1.0e-04 of the loss"
    assert printed[-1] == str(tmp_path / "loss.svg")
    ET.parse(tmp_path / "loss.svg")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.2, 5.4), (1, 60), (1, 2), (4.999, 5.0), (0, 123456)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    found = [*ticks(low, high)]
    assert 2 <= len(found) <= 8 and all(low <= one <= high for one in found)
    assert all(len(f"{one:.6g}") <= 7 for one in found)


def test_only_a_picture_is_replaced(tmp_path: Path) -> None:
    run, place = recorded(tmp_path / "run", (1, {1: 5.0, 2: 4.0})), tmp_path / "loss.svg"
    place.write_text("my notes")
    refused = ckpt("plot", run, "-o", place)
    assert refused.code == 2 and "the file is not a picture, and it would be replaced" in refused.err
    assert place.read_text() == "my notes"
    place.unlink()
    for _ in range(2):  # its own picture is
        assert ckpt("plot", run, "-o", place).code == 0 and place.read_text().startswith("<svg")
    assert ckpt("plot", run, "-o", tmp_path / "loss.png").code == 2
