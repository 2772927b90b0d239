"""`converters/megatron/remainders.py`: Transformer Engine's Adam stores 16 bits of each master."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt import api
from tests.frameworks.runs import DISTRIBUTED, Held, Job, run
from tests.support.commands import ckpt
from tests.support.engines import raw

AWARE = f"{DISTRIBUTED} --use-precision-aware-optimizer"
GATHERED = f"{AWARE} --dist-ckpt-optim-fully-reshardable"
SOURCES = [
    Job("buckets", 2, AWARE, ep=2, steps=3, engine=True),
    Job("gathered", 2, GATHERED, ep=2, steps=3, engine=True),
    Job("torch", 2, f"{AWARE} --ckpt-format torch", ep=2, steps=3, engine=True),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remainders")


@pytest.fixture(scope="module")
def saved(home: Path) -> dict[str, Held]:
    return run([replace(job, save=home / f"{job.name} run") for job in SOURCES], home / "saved")


def test_masters_are_whole_again(home: Path, saved: dict[str, Held]) -> None:
    read, known = api.open(home / "buckets run"), saved["buckets"].tensors
    assert read.tensors.keys() == known.keys()
    assert [key for key in known if raw(read[key][...]) != known[key]] == []
    rounded = [
        key for key in known if key[1] == "master" and known[key][2] != raw(read[key[0], "weight"][...].float())[2]
    ]
    assert len(rounded) > 100


def test_a_plain_optimizer_loads_them(home: Path, saved: dict[str, Held]) -> None:
    done = ckpt("convert", "auto", "megatron-dist", home / "buckets run", "-o", home / "out", "--world-size", "4")
    assert done.code == 0, done.err
    assert "only without --use-precision-aware-optimizer" in done.err
    target = Job("plain", 4, f"{DISTRIBUTED} --no-load-rng", ep=2, load=home / "out", engine=True)
    assert run([target], home / "loaded")["plain"].tensors == saved["buckets"].tensors


def test_what_is_gathered_is_left_out_or_refused(home: Path, saved: dict[str, Held]) -> None:
    read = api.open(home / "gathered run")
    assert {role for _, role in read.tensors} == {"weight", "buffer"}
    assert any("have only 16 bits" in note for note in read.notes)
    done = ckpt("inspect", home / "torch run")
    assert done.code == 3 and "only 16 bits per master" in done.err


def test_megatron_loads_its_own_buckets_and_not_what_it_gathered(home: Path, saved: dict[str, Held]) -> None:
    jobs = [
        Job("again", 2, f"{AWARE} --no-load-rng", ep=2, load=home / "buckets run", engine=True),
        Job("never", 2, f"{GATHERED} --no-load-rng", ep=2, load=home / "gathered run", engine=True, fails=True),
    ]
    found = run(jobs, home / "stock")
    weights = {key: tensor for key, tensor in saved["buckets"].tensors.items() if key[1] == "weight"}
    assert {key: tensor for key, tensor in found["again"].tensors.items() if key[1] == "weight"} == weights
    assert "AssertionError" in found["never"].facts["error"]
