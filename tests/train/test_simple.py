"""The trainer to copy (`train/simple.py`): every format resumes every other one, on other ranks."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import DEEPSPEED, RESUMING, fork
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

SCRIPT = REPOSITORY / "train" / "simple.py"
TORCH = ("ddp", "fsdp1", "fsdp2", "hsdp", "tp-fsdp")
ZERO = ("zero1", "zero2", "zero3")
STRATEGIES = (*TORCH, *ZERO)
BEFORE, AFTER = 4, 2  # ranks: hsdp and tp-fsdp have grids 2 by 2, and 2 by 1
#: All of torch's strategies save DCP. Every format goes to every other one. With ALL=1, each strategy of torch stops,
#: and goes on, with another one of torch, with itself, and with a stage of ZeRO.
ALL_PAIRS = [
    *((one, ZERO[number % 3]) for number, one in enumerate(TORCH)),
    ("tp-fsdp", "zero3"),  # boxes are cut at other places than for stages 1 and 2
    *((ZERO[number % 3], one) for number, one in enumerate(TORCH)),
    *((one, TORCH[(number + shift) % 5]) for shift in (1, 0) for number, one in enumerate(TORCH)),
    *product(ZERO, ZERO),
]


def facets(pair: tuple[str, str]) -> Iterator[object]:
    """Yield a strategy that stops or goes on, the kinds of files, whether they are equal, and boxes that are cut."""
    one, other = pair
    yield from (("stops", one), ("goes on", other))
    yield "files", one in ZERO, other in ZERO, one == other
    yield "boxes", one if one in ("tp-fsdp", "zero3") else None, other == "zero3"


PAIRS = sample(ALL_PAIRS, facets)
PRELOAD = [*DEEPSPEED, *RESUMING]
TITLE = f"train/simple.py in fp32, 2 steps on {BEFORE} ranks and 2 on {AFTER}: loss, of the unbroken run"
#: All strategies in a chain in one folder, in bf16 like the default.
CHAIN = [("zero3", 4), ("fsdp2", 3), ("hsdp", 2), ("tp-fsdp", 4), ("zero1", 2), ("ddp", 1), ("fsdp1", 3), ("zero2", 2)]


def start(strategy: str, ranks: int, output: Path, steps: int, *words: str) -> tuple[Any, ...]:
    return ranks, "train.simple", [strategy, "--output", str(output), "--steps", str(steps), *words]


def losses(printed: str) -> dict[str, dict[int, float]]:
    """Return each run's printed losses by step, by output folder."""
    found: dict[str, dict[int, float]] = {}
    steps: dict[int, float] = {}
    for line in printed.splitlines():
        if match := re.match(r"step (\d+): loss ([0-9.]+),", line):
            steps[int(match[1])] = float(match[2])
        elif match := re.match(r"saved (.*)", line):
            found.setdefault(Path(match[1]).parent.name, {}).update(steps)
            steps = {}
    return found


def test_it_can_be_read_and_copied() -> None:
    """It is short enough to read, and imports from ckpt only the public call."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 220
    names = [alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names]
    assert "ckpt" in names and "from train" not in text and re.findall(r"\bckpt\.(\w+)", text) == ["resume"]


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Return losses for every pair, every source, the chain, and the uninterrupted runs."""
    folder = tmp_path_factory.mktemp("pairs")
    words = ("--dtype", "fp32")
    sources = [start(one, BEFORE, folder / one, 2, *words) for one in STRATEGIES]
    before = losses(fork([*sources, start("ddp", AFTER, folder / "unbroken", 4, *words)], PRELOAD))
    for one, other in PAIRS:
        shutil.copytree(folder / one, folder / f"{one} {other}")
    starts = [start(other, AFTER, folder / f"{one} {other}", 4, *words) for one, other in PAIRS]
    starts += [start(one, ranks, folder / "chain", 2 * number) for number, (one, ranks) in enumerate(CHAIN, 1)]
    starts.append(start("ddp", 2, folder / "one strategy", 2 * len(CHAIN)))
    return before | losses(fork(starts, PRELOAD))


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda strategy: strategy)
def test_each_goes_on_where_any_has_stopped(
    one: str, other: str, went_on: dict[str, dict[int, float]], tables: Any
) -> None:
    unbroken, steps = went_on["unbroken"], went_on[one] | went_on[f"{one} {other}"]
    assert list(went_on[f"{one} {other}"]) == [3, 4]
    for step, loss in steps.items():
        tables[TITLE][f"{one} to {other}"][f"step {step}"] = f"{loss:.6f} {unbroken[step]:.6f}"
        assert loss == pytest.approx(unbroken[step], rel=5e-6), step


@pytest.mark.slow
def test_all_strategies_in_turn_in_one_folder(went_on: dict[str, dict[int, float]], tables: Any) -> None:
    """A user's case: one run folder, bf16, and another rank count each time."""
    found, unbroken = went_on["chain"], went_on["one strategy"]
    assert list(unbroken) == list(range(1, 2 * len(CHAIN) + 1))
    for step, loss in unbroken.items():
        one, ranks = CHAIN[(step - 1) // 2]
        row = tables["train/simple.py in bf16, from strategy to strategy in one folder: loss, of the unbroken run"]
        row[f"{one} on {ranks}"][f"step {2 - step % 2} of 2"] = f"{found[step]:.6f} {loss:.6f}"
        assert found[step] == pytest.approx(loss, abs=5e-3), step
