"""`ckpt/commands/resume/resuming.py`: the batch script on fewer nodes, and ranks that fail to load their part."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ckpt
from tests.support.engines import launch_in_turn, modeling, outcome
from tests.support.places import REPOSITORY
from tests.support.resuming import losses
from tests.support.sampling import sample
from train.config import STRATEGIES

pytestmark = pytest.mark.slow

TITLE = "fewer nodes, the defaults of every strategy: loss of the steps on fewer ranks, and of the unbroken run"
#: Ranks before and after, and RESUME, the script's `ckpt resume` options. There are more cases than strategies.
ALL_CASES = {
    "hsdp on 4": ("hsdp", 4, 2, ""),
    "tp-fsdp on 4": ("tp-fsdp", 4, 2, ""),
    **{strategy: (strategy, 2, 1, "") for strategy in STRATEGIES},
    "megatron-deepspeed": ("megatron-deepspeed", 2, 1, "--tp 1"),
    "fsdp2, more nodes": ("fsdp2", 1, 2, ""),
}
#: Each strategy on fewer ranks, and one on more.
CASES = dict(sample(ALL_CASES.items(), lambda case: [case[1][0], case[1][1] < case[1][2]]))
SCRIPT = (REPOSITORY / "train" / "slurm" / "multinode.sbatch").read_text()
PRELOAD = ["train.engines.zero", "train.engines.native", "tests.support.megatron_imports", modeling("llama")]


def job(strategy: str, output: Path, **options: Any) -> dict[str, Any]:
    # Megatron's softmax includes the vocabulary's padding, so the padding must be equal for every --tp.
    return {"strategy": strategy, "output": str(output), "dtype": "fp32", "vocab_multiple": 130, **options}


def train(strategy: str, output: Path, **options: Any) -> list[str]:
    """Return the job's command line."""
    options = job(strategy, output, **options)
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run four steps for each case, and two steps of another run to resume."""
    folder = tmp_path_factory.mktemp("fewer")
    jobs = defaultdict[int, list[dict[str, Any]]](list)
    for name, (strategy, ranks, _, _) in CASES.items():
        jobs[ranks] += [job(strategy, folder / "unbroken" / name, steps=4), job(strategy, folder / name, steps=2)]
    launch_in_turn(jobs.items(), folder)
    return folder


@pytest.fixture(scope="module")
def resumed(stopped: Path) -> Path:
    jobs = defaultdict[int, list[dict[str, Any]]](list)
    for name, (strategy, _, ranks, options) in CASES.items():
        run = stopped / name
        found = ckpt("resume", run, "--missing-ok", "--world-size", str(ranks), *options.split())
        assert found.code == 0, found.err
        assert ("as it is" in found.err) == (not re.search("zero|deepspeed", strategy)), found.err
        jobs[ranks].append(job(strategy, run, resume=found.out.strip(), until=4))
    launch_in_turn(jobs.items(), stopped)
    return stopped


def test_these_are_the_commands_of_the_script() -> None:
    assert 'ckpt resume "$RUN" --missing-ok --world-size "$RANKS" ${RESUME:-})' in SCRIPT
    assert 'exec python -m train "$@"\n\' "$LOGS" --output "$RUN" ${FOUND:+--resume "$FOUND"} "$@"' in SCRIPT


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_fewer_nodes(name: str, resumed: Path, tables: Any) -> None:
    """The trainer refuses a DCP checkpoint from other ranks, so `ckpt resume` must convert it."""
    found, unbroken = losses(resumed / name), losses(resumed / "unbroken" / name)
    assert sorted(found) == [1, 2, 3, 4]
    for step, loss in found.items():
        tables[TITLE][name][f"step {step}"] = f"{loss:.6f} {unbroken[step]:.6f}"
        assert loss == pytest.approx(unbroken[step], rel=2e-6), step


def started(words: list[str]) -> tuple[int, str]:
    """Start two ranks. Return their exit code and output."""
    code, _, said = outcome([(2, "train.__main__", words)], PRELOAD, 300)
    return code, said


def failed(words: list[str]) -> str:
    """Start ranks that must end with code 2. Return their errors and hints."""
    _, said = started(words)
    assert "exit code 2" in said, said[-3000:]
    return "\n".join(re.findall("^(?:train: error|hint): .*$", said, re.MULTILINE))


@pytest.mark.parametrize(
    ("strategy", "file"),
    [("zero3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"), ("zero3", "rng_state_1.pth"), ("fsdp2", "__1_0.distcp")],
)
def test_the_error_of_another_rank_is_shown_once(strategy: str, file: str, stopped: Path, tmp_path: Path) -> None:
    """Rank 0 only reports a closed connection, so the message must include rank 1's read error."""
    run = shutil.copytree(stopped / "unbroken" / strategy, tmp_path / "run")
    (cut,) = (path for path in run.rglob("*") if path.name.endswith(file))
    os.truncate(cut, 8000)
    said = failed(train(strategy, run, resume=run, steps=1))
    assert said.count("train: error: ") == 1 and "onnection" not in said
    assert re.search(r"--resume \S+: it cannot be loaded into this run: (rank \d: )?\w+: ", said)
    assert "hint: `ckpt check` finds damage" in said
    assert said.startswith("train: error: rank 1: ") == (strategy == "zero3")  # DCP tells all ranks


def test_a_checkpoint_that_no_rank_can_read_is_one_line(stopped: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped / "unbroken" / "zero2", tmp_path / "run")
    for file in run.rglob("*optim_states.pt"):
        os.truncate(file, 8000)
    said = failed(train("zero2", run, resume=run, steps=1))
    assert re.match(r"train: error: (rank \d: )?--resume \S+: it cannot be loaded into this run: ", said)
    assert said.count("train: error: ") == 1


def test_ddp_warns_of_nothing(tmp_path: Path) -> None:
    """By default, every rank prints torch's advice on find_unused_parameters."""
    code, said = started(train("ddp", tmp_path / "run", steps=1))
    assert code == 0 and re.sub("step 1: loss [0-9.]+\n", "", said) == ""


def test_a_pipeline_that_cannot_be_cut_is_one_line(tmp_path: Path) -> None:
    """An AssertionError from megatron-core would print 113 lines."""
    said = failed(train("megatron", tmp_path / "run", pp=2, vpp=2, accumulate=2, layers=2))
    assert said == "train: error: --pp 2 --vpp 2: 2 layers do not divide into 4 chunks"
