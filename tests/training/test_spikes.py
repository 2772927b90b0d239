"""`ckpt/training/spikes.py`, `train/operations/records.py`: loss spikes, and the checkpoints to keep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ckpt.training.spikes import RECENT, SpikeWatch
from train import data
from train.config import UserError
from train.operations import records

CALM = [5.0 - 0.01 * step for step in range(20)]


def test_a_jump_is_a_spike_until_it_is_over_and_is_not_remembered() -> None:
    watch = SpikeWatch()
    losses = [*CALM, 7.5, 7.4, 4.79]
    found = [batch for batch, loss in enumerate(losses, 1) if watch.is_spike(batch, loss)]
    assert found == [21, 22]
    assert watch.first is None and max(watch.history) == 5.0
    assert watch.is_spike(24, 7.0) and watch.first == 24


def test_what_a_run_does_anyway_is_no_spike() -> None:
    watch = SpikeWatch()
    falling = [6 * math.exp(-step / 20) + 0.05 * math.sin(step) for step in range(200)]
    assert not [step for step, loss in enumerate(falling) if watch.is_spike(step, loss)]
    assert not [loss for loss in (3.0, 30.0, 1.0) if SpikeWatch([3.0] * (RECENT - 1)).is_spike(1, loss)]


def test_a_run_that_learns_quickly_has_spikes_too() -> None:
    falling = [6.75, 6.85, 6.82, 6.63, 6.36, 6.12, 5.87, 5.71, 5.36, 5.22, 4.97, 4.84, 4.67, 4.51, 4.31]
    watch = SpikeWatch()
    assert not [loss for loss in falling if watch.is_spike(1, loss)]
    assert watch.is_spike(16, 6.58)


def test_no_number_is_always_a_spike() -> None:
    for loss in (math.nan, math.inf):
        assert SpikeWatch().is_spike(1, loss)


def test_an_earlier_history_goes_on() -> None:
    assert SpikeWatch(CALM).is_spike(21, 7.5) and not SpikeWatch().is_spike(21, 7.5)


def checkpoint(output: Path, step: int, calm: bool = True) -> None:
    folder = output / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"x" * step)
    records.write(output, folder, {"step": step, "calm": calm})


def test_the_newest_and_the_last_good_one_are_kept(tmp_path: Path) -> None:
    for step, calm in ((1, True), (2, True), (3, False), (4, False)):
        checkpoint(tmp_path, step, calm)
    assert records.keep(tmp_path, 1) == [tmp_path / "step-1", tmp_path / "step-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records", "step-2", "step-4"]
    assert [record.step for record in records.read_all(tmp_path)] == [2, 4]


def test_a_run_that_goes_on_from_before_forgets_what_came_after(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        checkpoint(tmp_path, step)
    assert records.abandon_after(tmp_path, 5) == [tmp_path / "step-10", tmp_path / "step-15"]
    assert [record.step for record in records.read_all(tmp_path)] == [5]
    assert json.loads((tmp_path / "records" / "step-15.abandoned").read_text())["step"] == 15


@pytest.mark.parametrize(
    "trained, skipped, first",
    [(0, [], 0), (48, [[48, 72]], 72), (24, [[48, 72]], 24), (72, [[24, 48], [96, 144]], 144), (0, [[0, 24]], 24)],
)
def test_the_position_behind_what_is_left_out(trained: int, skipped: list[list[int]], first: int) -> None:
    assert data.position(trained, skipped) == first


def test_what_is_left_out() -> None:
    assert data.merged([[72, 96], [0, 24], [24, 48], [80, 100]]) == [[0, 48], [72, 100]]
    assert data.parse_batches("17:20") == (17, 20)
    for words in ("17", "20:17", "0:3", "a:b", "1:2:3"):
        with pytest.raises(UserError, match="--skip-batches"):
            data.parse_batches(words)
