"""`python -m train --ranks N`: check the command line first, start the ranks, and show any rank's error once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from tests.support.engines import fork_once, modeling, outcome
from tests.support.places import REPOSITORY
from tests.support.sampling import sample
from train import ranks
from train.config import STRATEGIES

ENV = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
COMMAND = [sys.executable, "-m", "train", "--ranks", "2"]
FILES_OF_RANKS = ["--strategy", "fsdp2", "--save", "ranks", "--model", "toy"]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(command, cwd=REPOSITORY, env=ENV | env, capture_output=True, text=True, timeout=300)


def test_a_mistake_is_one_line_before_torch_is_there() -> None:
    script = "import sys, train.__main__ as t; code = t.main(); print('torch' in sys.modules); sys.exit(code)"
    words = ["--ranks", "2", "--strategy", "zerro3"]
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert re.fullmatch("train: error: argument --strategy: invalid choice: 'zerro3' .*\n", done.stderr)


def test_ranks_of_a_launcher_are_not_started_again() -> None:
    done = run("--strategy", "ddp", RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")
    assert (done.returncode, done.stderr) == (2, "train: error: --ranks 2: a launcher has started 4 already\n")


def test_the_help_has_groups_and_examples() -> None:
    done = run("--help")
    assert done.returncode == 0 and len(re.findall("^[a-z].*:$", done.stdout, re.MULTILINE)) >= 7
    assert len(re.findall("^  python -m train --ranks .*", done.stdout, re.MULTILINE)) == 2


@pytest.mark.slow
def test_every_strategy_works_with_the_defaults_alone(tmp_path: Path) -> None:
    def start(strategy: str, size: int) -> tuple[int, str, list[str]]:
        return size, "train.__main__", ["--strategy", strategy, "--output", str(tmp_path / f"{strategy}-{size}")]

    # Every strategy on 2 ranks, and one stage or version of each on 1
    cases = sample(product((2, 1), STRATEGIES), lambda case: [case[1], (case[0], case[1].rstrip("123"))])
    engines = ["train.engines.zero", "train.engines.native", "tests.support.megatron_imports"]
    fork_once(tmp_path, [start(strategy, size) for size, strategy in cases], [*engines, modeling("llama")])
    assert len(list(tmp_path.glob("*/metrics.jsonl"))) == len(cases)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Interrupt a run of ranks that import little and load a file each. Return its folder, exit code and stderr."""
    output = tmp_path_factory.mktemp("interrupted") / "run"
    words = [*FILES_OF_RANKS, "--until", "100000", "--beat", "0.2", "--output", str(output)]
    process = subprocess.Popen([*COMMAND, *words], cwd=REPOSITORY, env=ENV, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not (output / "metrics.jsonl").is_file():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    return output, process.returncode, said


@pytest.mark.slow
def test_an_interrupt_has_all_ranks_save(interrupted: tuple[Path, int, str]) -> None:
    output, code, said = interrupted
    assert code == 143 and "Traceback" not in said
    assert "SIGTERM: saved, and ended before the last step" in said and list(output.glob("step-*"))


@pytest.mark.slow
def test_the_error_of_any_rank_is_shown_once(interrupted: tuple[Path, int, str]) -> None:
    output, _, _ = interrupted
    words = [*FILES_OF_RANKS, "--steps", "1", "--output", str(output)]
    _, _, again = outcome([(2, "train.__main__", words)], ["train.engines.native"])
    (said,) = re.findall(r"^train: error: .*\n.*$", again, re.MULTILINE)
    assert "exit code 2" in again and re.fullmatch(
        r"train: error: --output \S+: a run has left .* there\nhint: use --resume .*", said
    )
    (cut,) = output.rglob("optim_world_size_2_rank_1.pt")
    os.truncate(cut, 1000)
    done = run(*words, "--resume", str(output))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.findall("^.*error: .*$", done.stderr, re.MULTILINE) == re.findall(
        "^train: error: rank 1: --resume .*$", done.stderr, re.MULTILINE
    )


@pytest.mark.slow
def test_the_tests_see_the_exit_code_of_each_rank() -> None:
    """A rank that only lost the connection may end before the rank with the error."""
    script = "import os, time; rank = int(os.environ['RANK']); time.sleep(rank); os._exit(rank + 1)"
    _, _, said = outcome([(2, "timeit", ["-n1", "-r1", script])])
    assert "rank 0: exit code 1\nrank 1: exit code 2\n" in said


@pytest.mark.parametrize("other", ["exit 1", "exec sleep 100"], ids=["fails without it", "waits for it"])
def test_a_rank_that_is_killed_is_named(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", 0.1)
    processes = [subprocess.Popen(["sh", "-c", script]) for script in (other, "kill -9 $$")]
    assert ranks._wait(processes) == 137
    assert capsys.readouterr().err == "train: error: rank 1 was ended by SIGKILL\n"
    processes[0].kill()
