"""The fuzz targets on damaged seeds: refused, or read consistently. `python -m tests.faults.fuzz` looks further."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.faults.fuzz import TARGETS, is_refused

CASES = 150


def damaged(data: bytes, random: Random) -> bytes:
    """Replace, cut out or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at, length = random.randrange(len(changed) + 1), random.choice((1, 1, 2, 8, 40))
        with_what = (random.randbytes(length), b"", bytes(changed[at : at + length]) * 2)
        changed[at : at + length] = random.choice(with_what)
    return bytes(changed)


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_seeds(target: str, tmp_path: Path) -> None:
    random, seeds = Random(target), TARGETS[target][1]()
    refused = [is_refused(target, damaged(random.choice(seeds), random), tmp_path) for _ in range(CASES)]
    assert any(refused)
    assert not all(is_refused(target, seed, tmp_path) for seed in seeds)
