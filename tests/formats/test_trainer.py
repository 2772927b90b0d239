"""HF Trainer's own folders: the committed run against what the live optimizer held, and names that shapes prove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt import api
from ckpt.errors import CorruptError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Layout
from converters.names.megatron.relation import architectures, module_order
from converters.names.transformers.order import as_registered
from converters.names.transformers.relation import build_model
from tests.support.describing import content
from tests.support.engines import Truth
from train.models import sizes_of

RUN = "trainer-plain"


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / RUN, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))


def truth_of(fixtures: Path) -> Truth:
    return Truth.load(fixtures / RUN / "truth" / "checkpoint-2.safetensors")


def test_equals_what_the_live_optimizer_held(fixtures: Path, run: Path) -> None:
    truth, checkpoint = truth_of(fixtures), api.open(run)
    assert (checkpoint.format, checkpoint.state.step) == ("trainer", 2)
    assert checkpoint.ties == truth.ties
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == truth.tensors
    decay, rest = checkpoint.state.param_groups
    assert list(decay.fqns) == truth.metadata["decayed"]
    assert (decay.options["weight_decay"], rest.options["weight_decay"]) == (0.1, 0.0)
    assert len(checkpoint.state.scalars["step"]) == len(decay.fqns) + len(rest.fqns)
    assert checkpoint.state.lr_scheduler["last_epoch"] == 2


@pytest.mark.parametrize("target", ["zero2", "zero3", "universal", "dcp", "full"])
def test_everything_goes_on_to_other_formats(fixtures: Path, run: Path, tmp_path: Path, target: str) -> None:
    ranks = 3 if target.startswith("zero") else None
    api.plan(api.open(run), target, Layout(world_size=ranks)).run(tmp_path / "out")
    written = api.open(tmp_path / "out", target)
    for (fqn, role), expected in truth_of(fixtures).tensors.items():
        key = (fqn, MASTER) if role == WEIGHT and (fqn, MASTER) in written.tensors else (fqn, role)
        assert content(written.tensors[key]) == expected, key


def test_weights_go_back_to_the_files_that_they_came_from(run: Path, tmp_path: Path) -> None:
    conversion = api.plan(api.open(run), "hf")
    conversion.run(tmp_path / "out")
    before, after = (api.open(folder, "hf") for folder in (run / "checkpoint-2", tmp_path / "out"))
    assert {k: content(t) for k, t in before.tensors.items()} == {k: content(t) for k, t in after.tensors.items()}
    assert any("optimizer states exp_avg" in line for line in conversion.plan.target.not_written)


def save_optimizer(run: Path, order: slice) -> None:
    """The same optimizer, in which the numbers of each group go to its parameters in another order."""
    path = run / "checkpoint-2" / "optimizer.pt"
    whole = torch.load(path)
    for group in whole["param_groups"]:
        group["params"] = group["params"][order]
    torch.save(whole, path)


def test_what_shapes_do_not_prove_is_left_out_and_said(run: Path) -> None:
    save_optimizer(run, slice(None, None, -1))
    checkpoint = api.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT} and not checkpoint.state.param_groups
    assert any("states are left out" in note for note in checkpoint.notes)


def test_an_architecture_with_other_tensors_proves_nothing(run: Path) -> None:
    path = run / "checkpoint-2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    checkpoint = api.open(run)
    assert not checkpoint.optimizer_states and any("left out" in note for note in checkpoint.notes)


def test_an_optimizer_of_another_kind_is_refused(run: Path) -> None:
    torch.save([1, 2], run / "checkpoint-2" / "optimizer.pt")
    with pytest.raises(CorruptError, match="no optimizer's state"):
        api.open(run)
    assert api.open(run, "hf").format == "hf"


@pytest.mark.parametrize("model_type", architectures())
def test_tables_have_the_order_in_which_transformers_registers(model_type: str) -> None:
    model = build_model({"model_type": model_type, **sizes_of(model_type)}, {})
    names = [name for name, _ in model.named_parameters()]
    assert as_registered(sorted(names), *module_order(model_type)) == names
