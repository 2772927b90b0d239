"""`train/operations/`: real engines with killed and hung ranks, spikes, kept checkpoints and compared runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ckpt
from tests.support.engines import fork, forked
from tests.support.places import REPOSITORY

pytestmark = pytest.mark.slow

TITLE = "Resumed after a kill: loss of each step"
GPT2 = {"strategy": "fsdp2", "model": "gpt2", "dtype": "fp32", "dropout": 0.1}
TRAINER = GPT2 | {"through": "trainer", "dtype": "bf16", "truth": True}
TOY = {"strategy": "ddp", "model": "toy", "dtype": "fp32", "lr": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, Any]:
    """Start two ranks; stop, continue and kill one of them. Return the run and the watcher's reports."""
    run, jobs = folder / "killed", folder / "endless.jsonl"
    job = TOY | {"output": str(run), "steps": 100_000, "save_every": 10, "keep": 2, "beat": 0.2}
    jobs.write_text(json.dumps(job) + "\n")
    command = forked([(2, "train.__main__", ["--jobs", str(jobs)])], ["train.engines.native"])
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log)
    try:
        _wait_for(lambda: len(list((run / "records").glob("*.json"))) >= 2, process, folder / "log")
        pid = json.loads((run / "heartbeats" / "rank-1.json").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        stopped = _watch(run, "--silent", "4")
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        died = _watch(run)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    return {"run": run, "pid": pid, "stopped": stopped, "died": died}


def _wait_for(condition: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


def _watch(run: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ckpt", "watch", str(run), "--every", "0.2", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def results(folder: Path, killed: dict[str, Any]) -> dict[str, str]:
    """Run all jobs in one start of two ranks and return how each ended."""
    gpt2 = GPT2 | {"output": str(folder / "gpt2")}
    on = GPT2 | {"resume": str(folder / "gpt2" / "step-4"), "steps": 4}
    toy = TOY | {"output": str(folder / "toy"), "save_every": 5, "keep": 1}
    good = toy | {"resume": str(folder / "toy" / "step-15")}
    trainer = TRAINER | {"output": str(folder / "trainer")}
    later = TRAINER | {"resume": str(folder / "trainer" / "checkpoint-2")}
    jobs: list[tuple[str, str | None, dict[str, Any]]] = [
        ("unbroken", None, gpt2 | {"steps": 8, "save_every": 4}),
        ("right", None, on | {"output": str(folder / "right")}),
        ("one", None, on | {"output": str(folder / "one"), "steps": 1}),
        ("spike", "bad batch", toy | {"steps": 30, "on_spike": "stop"}),
        ("too late", None, good | {"steps": 1, "skip_batches": "9:16"}),
        ("skipped", "bad batch", good | {"steps": 15, "skip_batches": "16:17"}),
        ("again", None, TOY | {"output": str(killed["run"]), "steps": 5, "resume": _newest(killed["run"])}),
        ("trainer", None, trainer | {"steps": 4, "save_every": 2, "track": "tensorboard"}),
        ("trainer, right", None, later | {"output": str(folder / "trainer-right"), "steps": 2}),
        ("trainer, more", None, trainer | {"resume": str(folder / "trainer"), "steps": 1, "keep": 1}),
    ]
    file = folder / "jobs.jsonl"
    lines = [json.dumps({"name": name, "plant": plant, "config": config}) for name, plant, config in jobs]
    file.write_text("\n".join(lines))
    fork([(2, "tests.engines.operations_worker", [str(file)])], ["transformers.models.gpt2.modeling_gpt2"])
    return dict(json.loads((folder / "results.json").read_text()))


def _newest(run: Path) -> str:
    """Return `ckpt resume`'s output if the newest checkpoint lacks a file, as if killed during the save."""
    newest = max((run / "records").glob("step-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    record = json.loads(newest.read_text())
    for name in record["files"]:
        (run / record["checkpoint"] / name).unlink()
    found = ckpt("resume", run, "--world-size", "2")
    assert found.code == 0 and "as it is" in found.err, found.err
    return found.out.strip()


def _log(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_a_stopped_rank_is_named(killed: dict[str, Any]) -> None:
    code, out = killed["stopped"]
    assert code == 1
    assert out.startswith(f"rank 1 (pid {killed['pid']} on ") and "no sign of life" in out
    assert "rank 0" not in out and f'File "{REPOSITORY}/train/' in out  # the stack at its last heartbeat


def test_a_killed_rank_is_named(killed: dict[str, Any]) -> None:
    code, out = killed["died"]
    assert code == 1 and out.startswith(f"rank 1 (pid {killed['pid']} on ") and "is gone" in out


def test_the_newest_complete_checkpoint_is_taken_up(
    killed: dict[str, Any], results: dict[str, str], tables: Any
) -> None:
    assert results["again"] == ""
    lines = [json.loads(line) for line in (killed["run"] / "metrics.jsonl").read_text().splitlines()]
    again = lines[-5:]
    first = again[0]["step"]
    assert (first - 1) % 10 == 0 and [line["step"] for line in again] == list(range(first, first + 5))
    before = {line["step"]: line for line in lines[:-5]}
    for line in again:
        assert (line["loss"], line["data"]) == (before[line["step"]]["loss"], before[line["step"]]["data"])
        tables[TITLE]["before the kill"][str(line["step"])] = f"{before[line['step']]['loss']:.6f}"
        tables[TITLE]["resumed"][str(line["step"])] = f"{line['loss']:.6f}"
    assert len(before) - first >= 9, "the newest checkpoint is passed over: it has no file"


def test_a_resume_goes_on_as_the_unbroken_run_did(folder: Path, results: dict[str, str]) -> None:
    assert results["unbroken"] == results["right"] == ""
    unbroken, resumed = _log(folder / "gpt2"), _log(folder / "right")
    assert list(resumed) == [5, 6, 7, 8]
    for step, line in resumed.items():
        for name in ("loss", "grad_norm", "lr", "data", "batch", "sequences"):
            assert line[name] == unbroken[step][name], (step, name)
        assert len(line["ranks"]["loss"]) == 2 and min(line["ranks"]["memory_bytes"]) > 1e7
        assert line["tokens_per_second"] == pytest.approx(24 * 16 / max(line["ranks"]["step_seconds"]))


def test_runs_are_compared(folder: Path, results: dict[str, str]) -> None:
    same = ckpt("verify", "--run", folder / "gpt2" / "step-8", folder / "right" / "step-8")
    assert same.code == 0, same.out
    assert "in the training state equal" in same.out
    other = ckpt("verify", "--run", folder / "gpt2" / "step-8", folder / "one" / "step-5")
    assert other.code == 1
    assert "differs  step: 8 and 5\n" in other.out and "differs  rng_state.1: uint8 [5056] " in other.out


def test_a_spike_keeps_the_last_good_checkpoint_and_its_batches_can_be_left_out(
    folder: Path, results: dict[str, str]
) -> None:
    run = folder / "toy"
    assert results["spike"].startswith("the loss spiked in step 16: ")
    hint = results["spike"].splitlines()[-1].replace(str(run), "outputs")
    assert hint == "hint: --resume outputs/step-15 --skip-batches 16:16"
    assert f"\n    {hint}\n" in (REPOSITORY / "docs" / "operations.md").read_text()
    (spike,) = map(json.loads, (run / "spikes.jsonl").read_text().splitlines())
    assert (spike["step"], spike["batch"], spike["last_good"]) == (16, 16, str(run / "step-15"))
    assert "batches up to 15 are trained already" in results["too late"]
    assert results["skipped"] == ""
    log = _log(run)
    assert [log[step]["batch"] for step in range(14, 20)] == [14, 15, 18, 19, 20, 21]
    assert max(log[step]["loss"] for step in range(16, 31)) < spike["limit"]
    assert json.loads((run / "records" / "step-30.json").read_text())["skipped"] == [[360, 408]]
    assert not (run / "step-25").exists() and (run / "step-30").exists()


def test_a_run_through_trainer_is_watched_too(folder: Path, results: dict[str, str]) -> None:
    run = folder / "trainer"
    assert results["trainer"] == results["trainer, right"] == results["trainer, more"] == ""
    unbroken, resumed = _log(run), _log(folder / "trainer-right")
    assert list(unbroken) == [1, 2, 3, 4, 5] and list(resumed) == [3, 4]
    for step, line in resumed.items():
        for name in ("loss", "grad_norm", "lr", "data", "batch", "sequences"):
            assert line[name] == unbroken[step][name], (step, name)
        assert line["grad_norm"] > 0 and len(line["ranks"]["loss"]) == 2
    beats = [json.loads((run / "heartbeats" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(beat["phase"], beat["step"]) for beat in beats] == [("done", 5)] * 2
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-5"], "--keep 1"
    assert list((run / "tensorboard").iterdir())
