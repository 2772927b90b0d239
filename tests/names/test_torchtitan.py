"""`converters/names/torchtitan.py`, `run_names.py`: torchtitan's checkpoints match its own adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
from ckpt.errors import CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import HUB, WEIGHT, Layout
from ckpt.plan.namespace import TORCHTITAN
from ckpt.plan.tensors import Shape
from converters.names import torchtitan

CASES = ("torchtitan-llama3", "torchtitan-llama3-0.3", "torchtitan-qwen3-moe", "torchtitan-deepseek-v3")


@pytest.mark.parametrize("name", CASES)
def test_the_hubs_files_are_those_of_torchtitans_adapter(fixtures: Path, tmp_path: Path, name: str) -> None:
    truth = load_file(fixtures / name / "truth" / "step-2.safetensors")
    source = ckpt.open(fixtures / name / "step-2", "dcp")
    assert source.namespace == TORCHTITAN
    plan = ckpt.plan(source, "hf")
    biases = [note for note in plan.plan.target.notes if "expert_bias" in note]
    assert len(biases) == (name == "torchtitan-qwen3-moe")
    plan.run(tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == truth.keys()
    for fqn, tensor in truth.items():
        assert torch.equal(written[fqn], tensor), fqn
    if not biases:
        assert ckpt.verify(source, ckpt.open(tmp_path / "hf"), only="weights").equal


def test_an_optimizers_states_are_turned_alike(fixtures: Path) -> None:
    """Moments have their parameter's shape and row order."""
    source = ckpt.open(fixtures / "torchtitan-llama3" / "step-2", "dcp")
    named = torchtitan.to_hub(source)
    assert named.namespace == HUB
    stored = {fqn for fqn, _ in named.tensors}
    assert {fqn for fqn, role in named.tensors if role == "exp_avg"} == stored
    fqn = "model.layers.1.self_attn.k_proj.weight"
    for role in (WEIGHT, "exp_avg", "exp_avg_sq"):
        there = named.tensors[fqn, role].source
        weight = named.tensors[fqn, WEIGHT].source
        assert type(there) is type(weight) and named.tensors[fqn, role].shape == (8, 16)


def test_its_own_runs_go_on_under_its_names(fixtures: Path, tmp_path: Path) -> None:
    source = ckpt.open(fixtures / "torchtitan-llama3" / "step-2", "dcp")
    ckpt.plan(source, "dcp").run(tmp_path / "dcp")
    written = ckpt.open(tmp_path / "dcp", "dcp")
    assert {fqn for fqn, _ in written.tensors} == {fqn for fqn, _ in source.tensors}
    assert ckpt.verify(source, written).equal


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return keys and shapes in a DCP folder, as read by torch."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(getattr(value, "size", ())) for key, value in found.items()}


def test_a_run_is_written_in_the_layout_that_it_loads(fixtures: Path, tmp_path: Path) -> None:
    """The model is at the top and the optimizer flattened, with exactly torchtitan's keys."""
    folder = fixtures / "torchtitan-llama3" / "step-2"
    ckpt.plan(ckpt.open(folder, "dcp"), "dcp", Layout(world_size=2)).run(tmp_path / "dcp")
    assert stored(tmp_path / "dcp") == stored(folder)
    state = {key: torch.zeros(shape) for key, shape in stored(folder).items() if "param_groups" not in key}
    truth = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.load(truth, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(state[key], truth[key]) for key in truth)


def test_a_model_of_the_hub_is_written_as_torchtitan_has_it(fixtures: Path, tmp_path: Path) -> None:
    """The result must match torchtitan 0.3.0's tensors. The source is its own adapter's output."""
    folder = fixtures / "torchtitan-llama3-0.3"
    hub = tmp_path / "hub"
    hub.mkdir()
    shutil.copy(folder / "truth" / "step-2.safetensors", hub / "model.safetensors")
    shutil.copy(folder / "config.json", hub)
    ckpt.plan(ckpt.open(hub), "dcp", Layout(names="torchtitan", world_size=2)).run(tmp_path / "dcp")
    shapes = stored(folder / "step-2")
    assert stored(tmp_path / "dcp") == shapes
    state, truth = ({key: torch.zeros(shape) for key, shape in shapes.items()} for _ in range(2))
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.load(truth, checkpoint_id=folder / "step-2", no_dist=True)
    assert all(torch.equal(state[key], truth[key]) for key in truth)


def test_names_that_a_format_does_not_write(fixtures: Path) -> None:
    source = ckpt.open(fixtures / "torchtitan-llama3" / "step-2")
    for target, names in (("hf", "torchtitan"), ("dcp", "hub"), ("dcp", "own")):
        with pytest.raises(UsageError, match="names"):
            ckpt.plan(source, target, Layout(names=names))


def test_without_a_config_names_stay(fixtures: Path, tmp_path: Path) -> None:
    """Queries can't be permuted without the number of heads."""
    shutil.copytree(fixtures / "torchtitan-llama3" / "step-2", tmp_path / "step-2")
    loads = ckpt.plan(ckpt.open(tmp_path / "step-2"), "hf").plan.target.loads
    assert loads is not None and loads.can is False and loads.why == "config.json is missing"


def test_a_config_of_another_model_is_refused(fixtures: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fixtures / "torchtitan-llama3", tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    for change, error in (
        ({"num_hidden_layers": 3}, CorruptError),
        ({"num_hidden_layers": 1}, LossError),
        ({"num_key_value_heads": 4}, CorruptError),
        ({"architectures": ["LlamaForTokenClassification"]}, UsageError),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(error):
            ckpt.plan(ckpt.open(folder / "step-2"), "hf")


@pytest.mark.parametrize("name", CASES)
def test_the_relation_is_one_to_one(fixtures: Path, name: str) -> None:
    source = ckpt.open(fixtures / name / "step-2", "dcp")
    shapes: dict[str, Shape] = {fqn: source.tensors[fqn, WEIGHT].shape for fqn, _ in source.tensors}
    saved = torchtitan.families.saved_of(source, "torchtitan's names", torchtitan.PERMUTED)
    torchtitan._relation(source, saved, shapes).check()
    torchtitan._relation(source, saved, ()).check()


#: The model of `torchtitan-llama3-0.3` in a run's settings, as torchtitan 0.3.0 writes them.
ROPE = {"dim": 4, "theta": 500000, "scaling": "llama", "scaling_factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_factor": 1.0, "beta_fast": 32.0}
PROJECTIONS = {"head_dim": 4, "n_heads": 4, "n_kv_heads": 2}
ATTENTION = {"n_heads": 4, "n_kv_heads": 2, "head_dim": None, "qkv_linear": PROJECTIONS, "rope": ROPE}
LAYER = {"attention": ATTENTION, "attention_norm": {"eps": 1e-05}}
RUN = {"dim": 16, "vocab_size": 24, "layers": [LAYER], "enable_weight_tying": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5, "head_dim": 4}, None),
        ({}, "rope_type llama3"),
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}, "num_attention_heads 4"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}, "rope_theta 500000"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor 1.0"),
        ({"rope_parameters": LLAMA3, "rms_norm_eps": 0.5}, "rms_norm_eps 1e-05"),
    ],
    ids=str,
)
def test_the_model_of_the_run_is_compared_with_the_config(
    fixtures: Path, tmp_path: Path, entries: dict[str, object], names: str | None
) -> None:
    """Other heads with equal shapes would get another order of rows."""
    step, fixture = tmp_path / "run/checkpoint/step-2", fixtures / "torchtitan-llama3-0.3"
    shutil.copytree(fixture / "step-2", step)
    config = {**json.loads((fixture / "config.json").read_text()), **entries}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ckpt.convert(step, "hf", tmp_path / "unknown", config=tmp_path)
    (tmp_path / "run/other.json").write_text('{"model_spec": ')
    settings = {"model_spec": {"name": "llama3", "flavor": "debugmodel", "model": RUN}, "training": {"steps": 2}}
    (tmp_path / "run/settings.json").write_text(json.dumps(settings))
    if names is None:
        ckpt.convert(step, "hf", tmp_path / "hf", config=tmp_path)
        return
    with pytest.raises(CorruptError, match="another model than the run") as refused:
        ckpt.convert(step, "hf", tmp_path / "hf", config=tmp_path)
    assert f"{names}, recorded by the run" in str(refused.value) and "settings.json" in str(refused.value)


@pytest.mark.parametrize("source", ["step-2", ".", "link"])
def test_the_run_is_found_from_a_relative_path_and_through_a_link(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    step, fixture = tmp_path / "run/checkpoint/step-2", fixtures / "torchtitan-llama3-0.3"
    shutil.copytree(fixture / "step-2", step)
    config = {**json.loads((fixture / "config.json").read_text()), "rope_parameters": LLAMA3}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    (tmp_path / "run/settings.json").write_text(json.dumps({"model_spec": {"model": RUN}}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(step)
    monkeypatch.chdir({"step-2": step.parent, ".": step, "link": tmp_path / "elsewhere"}[source])
    with pytest.raises(CorruptError, match="another model than the run"):
        ckpt.convert(source, "hf", tmp_path / "hf", config=tmp_path)


def test_one_of_several_runs_settings_describes_the_config(fixtures: Path, tmp_path: Path) -> None:
    step, fixture = tmp_path / "run/checkpoint/step-2", fixtures / "torchtitan-llama3-0.3"
    shutil.copytree(fixture / "step-2", step)
    config = {**json.loads((fixture / "config.json").read_text()), "rope_parameters": LLAMA3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, run in (("a.json", RUN | {"dim": 32}), ("b.json", RUN)):
        (tmp_path / "run" / name).write_text(json.dumps({"model_spec": {"model": run}}))
    ckpt.convert(step, "hf", tmp_path / "hf", config=tmp_path)
    (tmp_path / "run/b.json").unlink()
    with pytest.raises(CorruptError, match="another model than the run"):
        ckpt.convert(step, "hf", tmp_path / "other", config=tmp_path)
