"""The bundled trainer's trackers. Each library reads its own offline output back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import process
from train.config import Config, UserError
from train.operations import tracking

LINE = {
    "step": 0,
    "loss": 5.5,
    "grad_norm": 1.25,
    "lr": 0.5,
    "tokens_per_second": 1000.0,
    "ranks": {"step_seconds": [0.25, 0.75], "memory_bytes": [2.0**30, 2.0**31], "loss": [5.0, 6.0]},
}
WANTED = {
    "loss": 5.5,
    "grad_norm": 1.25,
    "lr": 0.5,
    "tokens_per_second": 1000.0,
    "rank_0/step_seconds": 0.25,
    "rank_1/step_seconds": 0.75,
    "rank_0/memory_bytes": 2.0**30,
    "rank_1/memory_bytes": 2.0**31,
    "rank_0/loss": 5.0,
    "rank_1/loss": 6.0,
}
#: The tracker calls of a three-step run, in a new process: wandb and trackio keep threads and processes.
RUN = f"""
import sys
from train.operations import tracking
from train.config import Config
tracker = tracking.open_tracker(Config(track=sys.argv[1], output=sys.argv[2], lr=0.125))
for step in (1, 2, 3):
    line = {LINE!r} | {{"step": step, "loss": step / 2, "grad_norm": None if step == 3 else 1.25}}
    tracker.log(tracking.flat(line), step=step)
tracker.finish()
"""
#: Output from trackio's own reader for a folder, as the last line.
READ_TRACKIO = f"""
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs({tracking.PROJECT!r})
print(json.dumps([run.name, run.config, SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)], default=str))
"""


def tracked(name: str, output: Path) -> None:
    pytest.importorskip(name)
    output.mkdir()
    done = process(name, output, script=RUN, cwd=output)
    assert done.code == 0, done.err


def test_numbers_of_ranks_have_names_of_their_own() -> None:
    assert tracking.flat(LINE) == WANTED
    assert "grad_norm" not in tracking.flat(LINE | {"grad_norm": None})


def test_a_wandb_run_is_offline_where_there_is_no_key_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracked("wandb", tmp_path / "run-7")
    (file,) = (tmp_path / "run-7" / "wandb").glob("offline-run-*/run-*.wandb")
    records = list(wandb_records(file))
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("ckpt-train", "run-7")
    config = {item.key: item.value_json for update in [run.config] for item in update.update}
    assert config["lr"] == "0.125" and config["track"] == '"wandb"'
    history = [
        {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(line["_step"], line["loss"], line.get("grad_norm")) for line in history] == [
        (1, 0.5, 1.25),
        (2, 1.0, 1.25),
        (3, 1.5, None),
    ]
    assert {name: history[0][name] for name in WANTED if name != "loss"} == {
        name: value for name, value in WANTED.items() if name != "loss"
    }


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield records of a .wandb file as wandb's messages: a 7 byte header, then LevelDB's log in 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.parametrize(
    "key, mode", [(None, False), ("a key", False)], ids=["no key", "a server that does not answer"]
)
def test_when_wandb_is_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None, mode: bool) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the `discard` port, without a listener
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert tracking.wandb_is_reachable(0.5) is mode


def test_a_tensorboard_run_is_read_back(tmp_path: Path) -> None:
    tracked("tensorboard", tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(WANTED)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [event.value for event in events.Scalars("rank_1/memory_bytes")] == [2.0**31] * 3


def test_a_trackio_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    tracked("trackio", tmp_path / "run-9")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run-9" / "trackio"))  # read while trackio is imported
    done = process(script=READ_TRACKIO)
    assert done.code == 0, done.err
    name, config, lines = json.loads(done.out.splitlines()[-1])
    assert name == "run-9" and (config["lr"], config["track"]) == (0.125, "trackio")
    assert [(line["step"], line["loss"], line.get("grad_norm")) for line in lines] == [
        (1, 0.5, 1.25),
        (2, 1.0, 1.25),
        (3, 1.5, None),
    ]
    assert {name: lines[0][name] for name in WANTED} == WANTED | {"loss": 0.5}


@pytest.mark.parametrize("name", tracking.PACKAGES)
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(
        UserError, match=rf"--track {name}: the package {name} is not installed here\nhint: pip install"
    ):
        tracking.require(name)
    tracking.require("none")


def test_an_unknown_tracker_and_that_none_is_imported() -> None:
    with pytest.raises(UserError, match=r"--track: 'mlflow' is not one of none, wandb, tensorboard, trackio"):
        Config(track="mlflow")
    loaded = "import sys, train.operations.tracking as t; print([name for name in t.PACKAGES if name in sys.modules])"
    assert process(script=loaded).out == "[]\n"
