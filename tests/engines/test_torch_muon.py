"""`converters/pytorch/dcp.py`, `state.py`: torch's Muon under DDP and FSDP2 moves to other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.plan.checkpoint import Layout
from tests.engines.torch_muon import WRAPPERS
from tests.support.engines import fork_once

pytestmark = pytest.mark.slow

MODULE = "tests.engines.torch_muon"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch-muon")
    fork_once(folder, [(2, MODULE, ["save", str(folder)])], ["torch"])
    for name in WRAPPERS:
        api.plan(api.open(folder / name), "dcp", Layout(world_size=3)).run(folder / f"{name}-converted")
    fork_once(folder, [(3, MODULE, ["load", str(folder)])], ["torch"])
    return folder


@pytest.mark.parametrize("name", WRAPPERS)
def test_torch_holds_every_bit(name: str, loaded: Path) -> None:
    before: dict[str, Any] = torch.load(loaded / f"{name}-save.pt")
    after: dict[str, Any] = torch.load(loaded / f"{name}-load.pt")
    assert before.pop("group") == after.pop("group")
    assert before.keys() == after.keys() and any(key.startswith("momentum_buffer/") for key in before)
    assert all(torch.equal(before[key], after[key]) for key in before)
