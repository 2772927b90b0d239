"""`converters/pytorch/keys.py`: several models in one DCP folder. `--tag` takes one, `check` looks at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt import api
from ckpt.errors import SeveralModelsError
from tests.support.commands import ckpt
from tests.support.dcp_folders import save


def model(value: float, name: str = "w.weight") -> dict[str, Any]:
    return {name: torch.full((2, 3), value)}


def optimizer(value: float, name: str = "w.weight") -> dict[str, Any]:
    states = {"exp_avg": torch.full((2, 3), value), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(2.0)}
    return {"state": {name: states}, "param_groups": [{"params": [name], "lr": value}]}


#: State dicts, and by tag of each model its value and its optimizer's learning rate.
ASKED: dict[str, tuple[dict[str, Any], Mapping[str, tuple[float, float | None]]]] = {
    "each with its optimizer": (
        {
            "actor": {"model": model(1), "optimizer": optimizer(1)},
            "critic": {"model": model(2), "optimizer": optimizer(2)},
        },
        {"actor.model": (1, 1), "critic.model": (2, 2), "critic": (2, 2)},
    ),
    "without optimizers": ({"actor": model(1), "ema": model(2)}, {"actor": (1, None), "ema": (2, None)}),
    "two optimizers of equal names": (
        {"model": model(1), "discriminator": model(2), "optimizer": optimizer(1), "optimizer_d": optimizer(2)},
        {"model": (1, None), "discriminator": (2, None)},
    ),
    "two optimizers of other names": (
        {
            "generator": model(1),
            "discriminator": model(2, "d.weight"),
            "optimizer_g": optimizer(1),
            "optimizer_d": optimizer(2, "d.weight"),
        },
        {"generator": (1, 1), "discriminator": (2, 2)},
    ),
}
#: State dicts with a model, and the tags of other models in the training state.
NAMED: dict[str, tuple[dict[str, Any], Mapping[str, float]]] = {
    "average": ({"ema": model(2)}, {"ema": 2}),
    "average of its own name": ({"model_ema": model(2)}, {"model_ema": 2}),
    "average in a dict": ({"ema": {"shadow": model(2), "decay": 0.9}}, {"ema.shadow": 2}),
    "average called model": ({"ema": {"model": model(2)}}, {"ema.model": 2, "ema": 2}),
    "other model": (
        {"discriminator": model(2, "d.weight"), "optimizer_d": optimizer(2, "d.weight")},
        {"discriminator": 2},
    ),
}


def values(folder: Path) -> set[float]:
    return {float(value) for tensor in load_file(folder / "model.safetensors").values() for value in tensor.flatten()}


@pytest.mark.parametrize("kind", ASKED)
def test_a_tag_takes_one_of_several_models(kind: str, tmp_path: Path) -> None:
    state, tags = ASKED[kind]
    place = save(state, tmp_path / "save")
    with pytest.raises(SeveralModelsError) as failure:
        api.open(place)
    assert set(failure.value.tags) <= tags.keys()
    refused = ckpt("convert", "auto", "hf", place, "-o", tmp_path / "out")
    assert refused.code == 6 and all(f"--tag {tag}" in refused.err for tag in failure.value.tags)
    for tag, (value, rate) in tags.items():
        done = ckpt("convert", "auto", "hf", place, "--tag", tag, "-o", tmp_path / tag)
        assert done.code == 0 and "; not carried: " in done.err, done.err
        assert values(tmp_path / tag) == {value}
        found = api.open(place, tag=tag)
        assert [group.options["lr"] for group in found.state.param_groups] == ([] if rate is None else [rate])
        assert bool(found.optimizer_states) == (rate is not None)
    assert ckpt("inspect", place, "--tag", "optimizer").code == 3
    assert ckpt("check", place).code == 0
    file = next(place.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-20])
    checked = ckpt("check", place)
    assert checked.code == 4 and "incomplete" in checked.out


@pytest.mark.parametrize("kind", NAMED)
def test_another_model_in_the_training_state_is_named(kind: str, tmp_path: Path) -> None:
    state, tags = NAMED[kind]
    own = {"model": model(1), "optimizer": optimizer(1)}
    assert not api.open(save(own, tmp_path / "alone")).notes
    place = save({**own, **state}, tmp_path / "save")
    notes = api.open(place).notes
    for number, (tag, value) in enumerate(tags.items()):
        assert number or sum(repr(tag) in note for note in notes) == 1
        assert ckpt("convert", "auto", "hf", place, "--tag", tag, "-o", tmp_path / tag).code == 0
        assert values(tmp_path / tag) == {value}
    for to in ("full", "hf"):
        done = ckpt("convert", "auto", to, place, "-o", tmp_path / to)
        assert done.code == 0 and repr(next(iter(tags))) in done.err
    assert values(tmp_path / "hf") == {1}
    assert ckpt("check", place).code == 0


def test_an_average_does_not_take_the_models_optimizer(tmp_path: Path) -> None:
    place = save({"model": model(1), "optimizer": optimizer(1), "ema": model(2)}, tmp_path)
    assert api.open(place, tag="model").optimizer_states
    assert not api.open(place, tag="ema").optimizer_states


def test_a_tag_takes_a_model_of_the_newest_step(tmp_path: Path) -> None:
    for step in (2, 4):
        both = {"actor": {"model": model(step)}, "critic": {"model": model(step + 0.5)}}
        save(both, tmp_path / "run" / f"step-{step}")
    done = ckpt("convert", "auto", "hf", tmp_path / "run", "--tag", "critic", "-o", tmp_path / "out")
    assert done.code == 0 and values(tmp_path / "out") == {4.5}
