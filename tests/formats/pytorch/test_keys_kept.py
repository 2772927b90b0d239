"""`converters/pytorch/keys.py`, `dcp.py`: DCP output has the keys that the run's own trainer loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import ckpt
from tests.support.dcp_folders import nested, save, trained

State = dict[str, Any]
TREES: dict[str, Callable[[State, State], State]] = {
    "slime": lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
    "recipe": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "other names": lambda model, optimizer: {"state": {"module": model, "optimizer_state_dict": optimizer}},
    "a list": lambda model, optimizer: {"state_dict": model, "optimizers": [optimizer]},
    "at the top": lambda model, optimizer: {**model, "optim": optimizer},
    "nobody's name": lambda model, optimizer: {"actor": model, "optim": optimizer},
}


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("tree", TREES)
def test_keys_keep_their_prefix(tree: str, is_flat: bool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    weights, states = nested(model, optimizer, is_flat)
    save(TREES[tree](weights, states), tmp_path / "source")
    flags = ["--flat-optimizer"] if is_flat else []
    done = ckpt("convert", "auto", "dcp", tmp_path / "source", "-o", tmp_path / "out", *flags)
    assert done.code == 0, done.err
    fresh, empty = trained()
    empty_weights, empty_states = nested(fresh, empty, is_flat)
    for leaves in (empty_weights, *empty_states.get("state", {}).values(), empty_states):
        for value in (value for value in leaves.values() if isinstance(value, torch.Tensor)):
            value.detach().zero_()
    asked = TREES[tree](empty_weights, empty_states)
    dcp.load(asked, checkpoint_id=tmp_path / "out", no_dist=True)  # raises on a missing key
    loaded, _ = nested(model, optimizer, is_flat)
    assert all(torch.equal(empty_weights[name], value) for name, value in loaded.items())
