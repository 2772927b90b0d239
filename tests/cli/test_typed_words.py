"""`ckpt/base/flags.py`, `ckpt/cli/parser.py`, `ckpt/commands/convert/command.py`, `ckpt/runs/from_hub.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.base.errors import UsageError
from ckpt.runs.from_hub import is_repository


@pytest.fixture
def run(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(fixtures / "moe-zero3", "run"))


def test_python_takes_dtypes_of_torch_and_sizes_as_ints(run: Path) -> None:
    names = ("float16", "torch.float16", torch.float16, "fp16")
    plans = [ckpt.plan(run, "hf", dtype=one, max_shard_size=10**9).to_json("out") for one in names]  # type: ignore[arg-type]
    assert all(one == plans[0] for one in plans) and {cast["to"] for cast in plans[0]["casts"]} == {"float16"}
    with pytest.raises(UsageError, match=r"takes no dtype='bf61'[\s\S]*did you mean bf16\?"):
        ckpt.plan(run, "hf", dtype="bf61")  # type: ignore[arg-type]
    for wrong in (torch.int8, 16, 1.0):
        with pytest.raises(UsageError, match="takes no dtype="):
            ckpt.plan(run, "hf", dtype=wrong)  # type: ignore[arg-type]


def test_a_local_folder_is_no_repository(run: Path) -> None:
    assert is_repository("org/name") and not is_repository("name") and not is_repository("a/b/c")
    shutil.copytree(run, "org/name")
    assert not is_repository("org/name")


def test_an_open_checkpoint_is_asked_by_name(run: Path) -> None:
    found = ckpt.open(run)
    assert found.step == 2 and found.get("nowhere") is None and found.get("model.norm.weight", "nothing") is None
    assert torch.equal(found.get("model.norm.weight")[...], found["model.norm.weight"][...])
