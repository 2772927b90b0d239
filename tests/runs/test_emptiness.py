"""`ckpt/runs/source_checks.py`: torch's optimizers without states, and empty parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt import api
from tests.support.commands import ckpt
from tests.support.dcp_folders import save

WHOLE = "every part of every tensor"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


def trained(steps: int, kind: str = "AdamW", every: bool = True, **options: Any) -> dict[str, Any]:
    """Return a script's checkpoint after `steps` with torch's own optimizer, with names."""
    model = Model()
    given = model.named_parameters() if every else [("used.weight", model.used.weight), ("used.bias", model.used.bias)]
    optimizer = getattr(torch.optim, kind)(given, **{"lr": 0.1, **options})
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}


def without(state: dict[str, Any], *numbers: int) -> dict[str, Any]:
    kept = {number: one for number, one in state["optimizer"]["state"].items() if number not in numbers}
    return {**state, "optimizer": {**state["optimizer"], "state": kept}}


def torch_file(state: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


EITHER = pytest.mark.parametrize("write", [torch_file, save])


@EITHER
@pytest.mark.parametrize(
    "state",
    [
        trained(0),
        trained(2, every=False),
        trained(2, "SGD"),
        trained(0, "SGD", momentum=0.9),
        trained(2, "SGD", every=False, momentum=0.9),
    ],
    ids=["fresh", "all trained", "plain SGD", "fresh momentum", "momentum"],
)
def test_a_healthy_optimizer_is_whole(
    state: dict[str, Any], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    done = ckpt("check", write(state, tmp_path / "save"))
    assert done.code == 0 and WHOLE in done.out, done.out


@EITHER
def test_an_unused_parameter_is_named_and_not_refused(
    write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    place = write(trained(2), tmp_path / "save")
    told = "2 of 4 parameters have no optimizer state (unused.weight, unused.bias): no gradient arrived"
    done = ckpt("check", place)
    assert done.code == 0 and told in done.out and WHOLE not in done.out, done.out
    assert told in " ".join(map(str, api.open(place).notes))


@EITHER
@pytest.mark.parametrize(
    "state",
    [without(trained(2, every=False), 0, 1), without(trained(2, "SGD", every=False, momentum=0.9), 0, 1)],
    ids=["Adam", "momentum"],
)
def test_an_optimizer_that_lost_all_states_is_not_whole(
    state: dict[str, Any], write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    place = write(state, tmp_path / "save")
    told = "the optimizer has no states after 2 steps"
    done = ckpt("check", place)
    assert done.code == 4 and "unknown" in done.out and told in done.out, done.out
    done = ckpt("convert", "auto", "full", place, "-o", tmp_path / "out")
    assert done.code == 0 and told in done.err
    assert told in ckpt("resume", place.parent if place.is_file() else place).err


@EITHER
def test_a_parameter_without_elements_is_named(write: Callable[[dict[str, Any], Path], Path], tmp_path: Path) -> None:
    whole = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(2, 3)}
    assert WHOLE in ckpt("check", write({"model": whole}, tmp_path / "whole")).out
    place = write({"model": {**whole, "a.weight": torch.ones(0, 3)}}, tmp_path / "save")
    told = "1 parameter has no elements (a.weight [0, 3])"
    done = ckpt("check", place)
    assert done.code == 0 and told in done.out and WHOLE not in done.out
    done = ckpt("convert", "auto", "hf", place, "-o", tmp_path / "out")
    assert done.code == 0 and told in done.err
    buffers = {**whole, "a.g_idx": torch.ones(0, 3)}
    assert WHOLE in ckpt("check", write({"model": buffers}, tmp_path / "buffers")).out


def test_a_model_without_an_element_is_no_model(tmp_path: Path) -> None:
    empty = {"a.weight": torch.ones(0, 3), "b.weight": torch.ones(0, 3)}
    (folder := tmp_path / "hf").mkdir()
    save_file(empty, folder / "model.safetensors")
    for place in (folder, torch_file({"model": empty}, tmp_path / "full"), save({"model": empty}, tmp_path / "dcp")):
        for command in (("check", place), ("convert", "auto", "hf", place, "-o", tmp_path / "out"), ("hash", place)):
            done = ckpt(*command)
            assert done.code == 4 and "none of 2 tensors has an element" in done.out + done.err


@pytest.mark.parametrize(("name", "shape", "is_named"), [("gain", (0,), True), ("gain", (0, 4), False)])
def test_a_placeholder_of_any_name_is_named(name: str, shape: tuple[int, ...], is_named: bool, tmp_path: Path) -> None:
    """ZeRO-3 leaves shape [0]. A model may declare [0, 4], except for a weight or bias."""
    save_file({"a.weight": torch.ones(2), name: torch.ones(shape)}, tmp_path / "model.safetensors")
    done = ckpt("check", tmp_path)
    assert done.code == 0
    assert (f"{name} {list(shape)}" in done.out) is is_named and (WHOLE in done.out) is not is_named, done.out
