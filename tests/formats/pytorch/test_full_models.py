"""`converters/pytorch/full.py`: several models in one torch file. `--tag` takes one, and none is taken silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt import api
from ckpt.errors import SeveralModelsError
from tests.support.commands import ckpt


def model(value: float) -> dict[str, Any]:
    return {"w.weight": torch.full((2, 3), value)}


def optimizer(value: float) -> dict[str, Any]:
    states = {"exp_avg": torch.full((2, 3), value), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(2.0)}
    return {"state": {"w.weight": states}, "param_groups": [{"params": ["w.weight"], "lr": value}]}


def saved(state: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    torch.save(state, folder / "model.pt")
    return folder


def taken(place: Path, tag: str, out: Path) -> float:
    done = ckpt("convert", "auto", "hf", place, "--tag", tag, "-o", out)
    assert done.code == 0, done.err
    return float(load_file(out / "model.safetensors")["w.weight"][0, 0])


@pytest.mark.parametrize("names", [("generator", "discriminator"), ("model", "state_dict")])
def test_of_several_models_a_tag_takes_one(names: tuple[str, str], tmp_path: Path) -> None:
    both = {name: model(number) for number, name in enumerate(names)}
    folder = saved({**both, "optimizer": optimizer(1)}, tmp_path / "save")
    for place in (folder, folder / "model.pt"):
        with pytest.raises(SeveralModelsError) as failure:
            api.open(place)
        assert set(failure.value.tags) == set(names)
        for number, name in enumerate(names):
            assert taken(place, name, tmp_path / f"{name}-{place.name}") == number
            assert not api.open(place, tag=name).optimizer_states
        done = ckpt("resume", place)
        assert done.code == 6 and f"--tag {names[0]}" in done.err and "only optimizer states" not in done.err
        assert ckpt("check", place).code == 0


def test_an_average_in_the_bundle_is_named(tmp_path: Path) -> None:
    own = {"model": model(1), "optimizer": optimizer(1), "stats": {"mean": torch.ones(3)}}
    assert not api.open(saved(own, tmp_path / "own")).notes
    folder = saved({**own, "ema": model(2)}, tmp_path / "save")
    done = ckpt("convert", "auto", "hf", folder, "-o", tmp_path / "out")
    assert done.code == 0 and "'ema' looks like another model" in done.err
    assert taken(folder, "ema", tmp_path / "ema") == 2
    assert taken(folder, "model", tmp_path / "model") == 1
    assert api.open(folder, tag="model").optimizer_states and not api.open(folder, tag="ema").optimizer_states


def test_one_model_next_to_statistics_is_taken(tmp_path: Path) -> None:
    folder = saved({"net": model(1), "stats": {"mean": torch.ones(3)}}, tmp_path / "save")
    assert [fqn for fqn, _ in api.open(folder).tensors] == ["w.weight"]


def test_bundles_of_a_model_and_an_optimizer_are_asked_about(tmp_path: Path) -> None:
    both = {name: {"model": model(n), "optimizer": optimizer(n)} for n, name in ((1, "actor"), (2, "critic"))}
    folder = saved({**both, "epoch": 3}, tmp_path / "save")
    for place in (folder, folder / "model.pt"):
        with pytest.raises(SeveralModelsError) as failure:
            api.open(place)
        assert failure.value.tags == ("actor", "critic")
        for tag, value in (("actor", 1), ("critic", 2), ("critic.model", 2)):
            found = api.open(place, tag=tag)
            assert found.optimizer_states and found.state.param_groups[0].options["lr"] == value
            assert taken(place, tag, tmp_path / f"{place.name}-{tag}") == value
            assert any("not carried from model.pt" in note and "epoch" in note for note in found.notes)
    refused = ckpt("convert", "auto", "hf", folder, "-o", tmp_path / "out")
    assert "--tag actor or --tag critic" in refused.err
    assert ckpt("check", folder).code == 0
    assert ckpt("inspect", folder, "--tag", "reward").code == 3


def test_one_bundle_is_not_asked_about(tmp_path: Path) -> None:
    folder = saved({"model": model(1), "extra": {"model": model(2)}}, tmp_path / "save")
    assert float(taken(folder, "model", tmp_path / "out")) == 1


@pytest.mark.parametrize("inner", [{"model": model(2)}, {"decay": 0.9, "shadow": {"module": model(2)}}])
def test_an_average_in_a_bundle_of_its_own_is_named(inner: dict[str, Any], tmp_path: Path) -> None:
    own = {"model": model(1), "optimizer": optimizer(1), "train": {"stats": {"mean": torch.ones(3)}}, "step": 4}
    assert not api.open(saved(own, tmp_path / "own")).notes
    for number, state in enumerate(({**own, "ema": inner}, {**model(1), "ema": inner})):
        folder = saved(state, tmp_path / f"save-{number}")
        assert any("'ema' looks like another model" in note for note in api.open(folder).notes)
        assert taken(folder, "ema", tmp_path / f"ema-{number}") == 2
        assert "model" not in state or taken(folder, "model", tmp_path / f"model-{number}") == 1


def test_the_only_bundle_is_taken_with_what_is_next_to_it(tmp_path: Path) -> None:
    for number, state in enumerate(
        (
            {"actor": {"model": model(1), "optimizer": optimizer(1)}, "epoch": 3, "step": 7},
            {"actor": {"model": model(1)}, "optimizer": optimizer(1), "epoch": 3, "step": 7},
            {"outer": {"actor": {"net": model(1)}, "epoch": 3}, "optimizer": optimizer(1), "step": 7},
        )
    ):
        folder = saved(state, tmp_path / f"save-{number}")
        found = api.open(folder)
        assert [fqn for fqn, role in found.tensors if role == "weight"] == ["w.weight"] and found.optimizer_states
        assert found.state.step == 7 and "epoch" in found.state.entries(), found.state
        assert not any("not carried" in note or "are left out" in note for note in found.notes)
        assert ckpt("convert", "auto", "hf", folder, "-o", tmp_path / f"out-{number}").code == 0
    both = saved({"actor": {"model": model(1), "step": 7}, "step": 9}, tmp_path / "both")
    assert api.open(both).state.step == 7
    assert any("not carried from model.pt: step" in note for note in api.open(both).notes)


def test_statistics_in_a_dict_are_no_model(tmp_path: Path) -> None:
    folder = saved({"metrics": {"running": {"mean": torch.ones(3)}}, "epoch": 3}, tmp_path / "save")
    assert ckpt("inspect", folder).code == 3
