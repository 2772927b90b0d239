"""`ckpt/views/storage_reader.py`, `state_keys.py`: `dcp.load` for any format, against the live engines' truth."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpt
from ckpt.errors import LossError, StorageError, UsageError
from ckpt.move.files import OpenFiles
from ckpt.move.reading import read_box, read_box_into
from ckpt.plan.checkpoint import BUFFER, MASTER, TRANSFORMERS, WEIGHT, Layout
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Tensor, Whole, contiguous_strides, whole
from ckpt.state.naming import to_namespace
from ckpt.views import storage_reader
from ckpt.views.lazy import LazyTensor
from tests.support.engines import Truth, launch, raw
from tests.support.places import FIXTURES

ZERO2, ZERO3, DCP = FIXTURES / "trainer-zero2", FIXTURES / "moe-zero3", FIXTURES / "dcp-fsdp2"


def truth_of(fixture: Path) -> Truth:
    return Truth.load(max((fixture / "truth").iterdir()))


def weights(truth: Truth) -> dict[tuple[str, str], Any]:
    return {key: tensor for key, tensor in truth.tensors.items() if key[1] == WEIGHT}


def load(state: dict[str, Any], path: Path, **options: Any) -> ckpt.StorageReader:
    """Run `dcp.load` in one process. Raise the rank's own error."""
    reader = ckpt.StorageReader(path, **options)
    try:
        dcp.load(state, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return reader


def warned(function: Any, *arguments: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    return result, [text for one in caught if str(FIXTURES) in (text := str(one.message))]


def same(a: Any, b: Any) -> bool:
    """Return True if two state dicts are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and raw(a) == raw(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b


def emptied(value: Any) -> Any:
    """Overwrite every tensor in a state dict."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 3)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    return [emptied(item) for item in value] if isinstance(value, list) and value and type(value[0]) is dict else value


@pytest.mark.parametrize(
    "name",
    [
        *("toy-zero0", "toy-zero1", "toy-zero3", "lora-zero3", "trainer-zero2", "megatron-dist-flattened"),
        *("dcp-fsdp2", "torchtitan-llama3", "quantized-full/ao8.pt"),
    ],
)
def test_it_gives_what_torch_reads_of_the_converted_folder(name: str, tmp_path: Path) -> None:
    """Compare everything: model, optimizer, param groups, training state, each leaf."""
    checkpoint = ckpt.open(FIXTURES / name)
    plain = checkpoint.with_plain_states() if checkpoint.quantized.methods else checkpoint
    ckpt.plan(plain, "dcp", Layout(world_size=2)).run(tmp_path / "out")
    folders = {path.parent for path in (tmp_path / "out").rglob(".metadata")}
    expected: dict[str, Any] = {}
    for folder in folders:
        found: dict[str, Any] = {}
        reader = dcp.FileSystemReader(folder)
        values = reader.read_metadata().state_dict_metadata
        _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        # torch's planner never requests a dict stored as one value: it would request its entries.
        expected |= {key: value for key, value in found.items() if not (key in values and isinstance(value, dict))}
    assert expected
    state = emptied(expected)
    load(state, FIXTURES / name)
    assert same(state, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixture", [ZERO2, ZERO3])
def test_a_parameter_is_given_what_is_of_its_dtype(fixture: Path, dtype: torch.dtype) -> None:
    """A float32 parameter gets the master, a bf16 one the stored or rounded weight; frozen ones have no master."""
    truth = truth_of(fixture)
    wanted = {fqn for fqn, role in truth.tensors if role == WEIGHT and fqn not in truth.ties}
    state = {fqn: torch.zeros(truth.tensors[fqn, WEIGHT][1], dtype=dtype) for fqn in wanted}
    load(state, fixture)
    for fqn, tensor in state.items():
        role = MASTER if dtype == torch.float32 and (fqn, MASTER) in truth.tensors else WEIGHT
        expected = truth.tensors[fqn, role]
        if role == WEIGHT and dtype == torch.float32:
            expected = raw(torch.frombuffer(bytearray(expected[2]), dtype=torch.bfloat16).float().reshape(expected[1]))
        assert raw(tensor) == expected, fqn


def test_what_is_left_is_said_once() -> None:
    truth = truth_of(DCP)
    state = {fqn: torch.zeros(truth.tensors[fqn, WEIGHT][1]) for fqn in ("down.weight", "gain")}
    _, said = warned(load, state, DCP)
    (line,) = said
    assert "parameters and buffers (2)" in line and "states exp_avg (2)" in line and "param groups" in line
    assert raw(state["gain"]) == truth.tensors["gain", WEIGHT]


def test_a_name_that_is_not_there() -> None:
    state = {"model": {"gain": torch.zeros(3), "bias": torch.zeros(3)}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"Missing key .*model\.bias"):
            load(state, DCP)
    (line,) = [str(one.message) for one in caught if str(DCP) in str(one.message)]
    assert "'model.bias' is requested, but the checkpoint only has model." in line
    partly = {"model": {"gain": torch.zeros(3), "bias": torch.zeros(3), "other": torch.zeros(3)}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    reader = ckpt.StorageReader(DCP)
    for _ in range(2):
        _, said = warned(dcp.load, partly, storage_reader=reader, planner=planner, no_dist=True)
        assert sum("left unchanged: model.bias, model.other" in line for line in said) == 1
    assert raw(partly["model"]["gain"]) == truth_of(DCP).tensors["gain", WEIGHT]


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": {"param_groups": [{"params": ["gain"], "lr": 0.0}]}}])
@pytest.mark.parametrize("outer", [True, False])
def test_a_model_of_other_names_is_refused(outer: bool, optimizer: dict[str, Any]) -> None:
    """A PEFT-wrapped model shares no name with it; a partial load would leave it unchanged."""
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0"], r=2)).state_dict()
    state = {"model": wrapped, **optimizer} if outer else dict(wrapped)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(dcp.CheckpointException) as told:
        dcp.load(state, storage_reader=ckpt.StorageReader(DCP), planner=planner, no_dist=True)
    (error,) = (failure for failure, _ in told.value.failures.values())
    assert isinstance(error, LossError) and "the requested tensors are not in the checkpoint" in error.what
    assert "base_model.model." in error.found and "PEFT" in error.hint


def test_nothing_at_all_is_refused_and_a_value_is_something() -> None:
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(dcp.CheckpointException, match="the requested tensors are not in the checkpoint"):
        dcp.load({"epoch": 0}, storage_reader=ckpt.StorageReader(DCP), planner=planner, no_dist=True)
    values = {"epoch": 0, "optimizer": {"param_groups": [{"params": ["gain"], "lr": 0.0}]}}
    dcp.load(values, storage_reader=ckpt.StorageReader(DCP), planner=planner, no_dist=True)
    assert values["optimizer"]["param_groups"][0]["lr"] > 0
    dcp.load({}, storage_reader=ckpt.StorageReader(DCP), planner=planner, no_dist=True)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Open a process group with one process."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def agree(*paths: Path) -> None:
    """Plan a global load with one rank for each path."""
    readers = [ckpt.StorageReader(path) for path in paths]
    readers[0].prepare_global_plan([reader.prepare_local_plan(LoadPlan([])) for reader in readers])


@pytest.mark.parametrize("form", ["hf", "dcp", "full"])
def test_two_runs_of_the_same_shapes_are_told_apart(group: None, form: str, tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = {name: torch.rand(1000, 3) for name in ("a.weight", "b.weight", "c.weight")}
        folder = tmp_path / str(seed) / "run"
        folder.mkdir(parents=True)
        if form == "hf":
            save_file(state, folder / "model.safetensors")
        elif form == "dcp":
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        else:
            torch.save(state, folder / "model.pt")
        folders.append(folder)
    with pytest.raises(StorageError, match="opened different checkpoints") as told:
        agree(*folders)
    assert "with other contents" in str(told.value)
    shutil.copytree(folders[0], tmp_path / "another node" / "run")
    agree(folders[0], folders[0], tmp_path / "another node" / "run")


@pytest.mark.parametrize(
    "name", ["toy-zero1", "moe-zero3", "dcp-fsdp2", "verl-fsdp2", "megatron-dist-flattened", "quantized-gathered"]
)
def test_copies_on_several_disks_are_the_same(group: None, name: str, tmp_path: Path) -> None:
    agree(FIXTURES / name, shutil.copytree(FIXTURES / name, tmp_path / "another node" / name))


def test_one_element_that_differs_in_a_zip_is_told(group: None, tmp_path: Path) -> None:
    """A zip stores its records' checksums at its end."""
    for name, value in (("a", 0), ("b", 1)):
        (tmp_path / name / "run").mkdir(parents=True)
        weight = torch.zeros(1 << 20)
        weight[1 << 19] = value
        torch.save({"weight": weight}, tmp_path / name / "run" / "model.pt")
    with pytest.raises(StorageError, match="opened different checkpoints"):
        agree(tmp_path / "a" / "run", tmp_path / "b" / "run")


def test_another_shape_and_another_kind_of_dtype() -> None:
    with pytest.raises(ValueError, match="Size mismatch"):
        load({"gain": torch.zeros(4)}, DCP)
    with pytest.raises(LossError, match="cannot be cast"):
        load({"gain": torch.zeros(3, dtype=torch.int32)}, DCP)


def test_states_that_are_rounded_are_said() -> None:
    state = {"optimizer": {"state": {"gain": {"exp_avg": torch.zeros(3, dtype=torch.bfloat16)}}}}
    _, said = warned(load, state, DCP)
    assert any("1 exp_avg state rounded: stored in float32, and asked for in bfloat16" in line for line in said)


def asked_groups(*members: list[str]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": [{"lr": 0.0, "weight_decay": 0.0, "params": fqns} for fqns in members]}}


DECAYED, OTHERS = sorted(truth_of(ZERO2).metadata["param_groups"], key=lambda group: -group["weight_decay"])


class TestParamGroups:
    """Two param groups, with and without decay, found by their parameters in any order."""

    def test_in_another_order_and_number(self) -> None:
        state = asked_groups(OTHERS["names"], DECAYED["names"][:3], DECAYED["names"][3:])
        load(state, ZERO2)
        first, *rest = state["optimizer"]["param_groups"]
        assert first["lr"] == OTHERS["lr"] and first["params"] == OTHERS["names"]
        for group in rest:
            assert (group["lr"], group["weight_decay"]) == (DECAYED["lr"], DECAYED["weight_decay"])

    def test_one_with_parameters_of_both_is_refused(self) -> None:
        with pytest.raises(LossError, match="in one param group have different options"):
            load(asked_groups([*DECAYED["names"], *OTHERS["names"]]), ZERO2)

    def test_flattened_by_a_tied_name(self) -> None:
        state = {"optimizer": {"param_groups.lm_head.weight.lr": 0.0}}
        load(state, ZERO2)
        assert state["optimizer"]["param_groups.lm_head.weight.lr"] == DECAYED["lr"]

    def test_a_parameter_that_was_not_trained(self) -> None:
        with pytest.raises(LossError, match="does not record") as caught:
            load(asked_groups(["model.layers.0.mlp.up_proj.weight"]), ZERO2)
        assert caught.value.found == "it is in no param group"


def test_other_outer_names() -> None:
    state = {"app": {"net": {"gain": torch.zeros(3)}, "opt": {"state": {"gain": {"exp_avg": torch.zeros(3)}}}}}
    load(state, DCP, model="app.net", optimizer="app.opt")
    truth = truth_of(DCP).tensors
    assert raw(state["app"]["net"]["gain"]) == truth["gain", WEIGHT]
    assert raw(state["app"]["opt"]["state"]["gain"]["exp_avg"]) == truth["gain", "exp_avg"]


def test_the_path_may_be_the_checkpoint_id() -> None:
    state = {"gain": torch.zeros(3)}
    dcp.load(state, checkpoint_id=str(DCP), storage_reader=ckpt.StorageReader(), no_dist=True)
    assert raw(state["gain"]) == truth_of(DCP).tensors["gain", WEIGHT]
    with pytest.raises(UsageError, match="no checkpoint to read"):
        ckpt.StorageReader().read_metadata()


def test_a_source_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "run")
    reader = ckpt.StorageReader(tmp_path / "run")
    for file in (tmp_path / "run").rglob("*.distcp"):
        file.write_bytes(file.read_bytes())
    with pytest.raises(dcp.CheckpointException, match="replaced while it was being read"):
        dcp.load({"gain": torch.zeros(3)}, storage_reader=reader, no_dist=True)


def test_replicas_that_disagree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = ckpt.open(DCP)
    (tmp_path / "other").write_bytes(bytes(12))
    other = Whole(Extent.contiguous(str(tmp_path / "other"), 0, FLOAT32, (3,)))
    gain = checkpoint.tensors["gain", WEIGHT]._replace(replicas=(other,))
    differing = replace(checkpoint, tensors={**checkpoint.tensors, ("gain", WEIGHT): gain})
    monkeypatch.setattr(storage_reader, "open_checkpoint", lambda *_, **__: differing)
    with pytest.raises(Exception, match="copies disagree for one tensor"):
        load({"gain": torch.zeros(3)}, DCP)


def test_a_part_is_read_with_no_more_than_its_bytes(tmp_path: Path) -> None:
    """Columns in wide rows, in several fragments, and in a transposed tensor; and adjacent narrow columns."""
    path, shape = str(tmp_path / "a"), (12, 6000)
    values = np.random.default_rng(2).random(shape, np.float32)
    Path(path).write_bytes(values.tobytes() + np.ascontiguousarray(values.T).tobytes())
    plain = Whole(Extent.contiguous(path, 0, FLOAT32, shape))
    turned = Whole(Extent(path, values.nbytes, FLOAT32, shape, (1, 12)))
    halves = [Box((0, 0), (12, 2500)), Box((0, 2500), (12, 3500))]
    extents = [Extent(path, 4 * box.offsets[1], FLOAT32, box.sizes, contiguous_strides(shape)) for box in halves]
    parts = Pieces(tuple(map(Fragment, halves, extents)))
    for source, most in ((plain, 1.0), (parts, 1.0), (turned, 12 / 5)):
        tensor = Tensor("w", "weight", FLOAT32, shape, source)
        for box in (Box((3, 1000), (5, 3000)), Box((2, 0), (5, 6000)), whole(shape), Box((11, 5999), (1, 1))):
            buffer = memoryview(bytearray(4 * box.numel))
            with OpenFiles() as sources:
                read = read_box_into(tensor, box, {}, sources, buffer)
            part = values[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]
            assert bytes(buffer) == part.tobytes() == read_box(tensor, box, {}).tobytes()
            assert read <= most * len(buffer)


MEGATRON = FIXTURES / "megatron-dist-flattened"


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with transformers."""
    return save_model(5, tmp_path_factory.mktemp("hf"))


def save_model(seed: int, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MEGATRON)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, hub_folder: Path) -> dict[str, tuple[dict[str, Any], Truth]]:
    """Return the state on four FSDP2 ranks, by job, from a single launch."""
    folder = tmp_path_factory.mktemp("loaded")
    another_run = save_model(6, folder / "another run" / hub_folder.name)
    jobs = {
        "zero3": {"path": ZERO3, "config": ZERO3, "form": "nested"},
        "zero3-bf16": {"path": ZERO3, "config": ZERO3, "form": "bare", "dtype": "bfloat16"},
        "zero2": {"path": ZERO2, "config": ZERO2 / "checkpoint-2", "form": "flat", "freeze": r"layers\.0\.mlp"},
        "megatron": {"path": MEGATRON, "config": MEGATRON, "form": "nested"},
        "dcp": {"path": DCP, "form": "named"},
        "hf": {"path": hub_folder, "config": hub_folder, "form": "bare"},
        "missing": {"path": DCP, "form": "nested", "missing": True},
        "other": {"path": DCP, "form": "nested", "other": shutil.copytree(DCP / "step-2", folder / "run" / "step-3")},
        "contents": {"path": hub_folder, "config": hub_folder, "form": "bare", "other": another_run},
        "copy": {"path": DCP, "form": "nested", "other": shutil.copytree(DCP, folder / "another node's")},
    }
    lines = [
        {key: str(value) if isinstance(value, Path) else value for key, value in job.items()}
        | {"output": str(folder / name)}
        for name, job in jobs.items()
    ]
    launch(lines, 4, folder, "tests.views.storage_reading")
    return {
        name: (json.loads((folder / name / "read.json").read_text()), Truth.load(folder / name / "truth.safetensors"))
        for name in jobs
    }


@pytest.mark.slow
class TestFourRanks:
    """zero3 (2 ranks), zero2 (2), megatron (3), dcp (2) and a Hub folder, loaded by FSDP2 on 4 ranks."""

    @pytest.mark.parametrize(("name", "fixture"), [("zero3", ZERO3), ("zero2", ZERO2), ("dcp", DCP)])
    def test_they_hold_what_the_live_engine_held(self, loaded: Any, name: str, fixture: Path) -> None:
        expected, (facts, found) = truth_of(fixture), loaded[name]
        compared = 0
        for (fqn, role), tensor in expected.tensors.items():
            if role == WEIGHT and (fqn, MASTER) in expected.tensors:
                continue  # FSDP keeps the master
            at = found.ties.get(fqn, fqn), WEIGHT if role == MASTER else role
            if role == WEIGHT and name == "zero2":  # frozen, without a master
                tensor = raw(torch.frombuffer(bytearray(tensor[2]), dtype=torch.bfloat16).float().reshape(tensor[1]))
            assert found.tensors.get(at, found.tensors.get((fqn, BUFFER))) == tensor, at  # DCP does not mark buffers
            compared += 1
        assert compared > 5
        if name != "dcp":
            groups = sorted((g["lr"], g["weight_decay"], len(g["names"])) for g in expected.metadata["param_groups"])
            assert sorted((g["lr"], g["weight_decay"], g["num_params"]) for g in facts["groups"]) == groups
            assert found.metadata["adam_step"] == expected.metadata["adam_step"]

    def test_of_megatron_under_the_names_of_transformers(self, loaded: Any) -> None:
        checkpoint = to_namespace(ckpt.open(MEGATRON), TRANSFORMERS)
        _, found = loaded["megatron"]
        for (fqn, role), tensor in found.tensors.items():
            stored = checkpoint.tensors[fqn, MASTER if role == WEIGHT else role]
            assert tensor == raw(LazyTensor(stored, checkpoint.computed)[...]), (fqn, role)
        assert found.metadata["adam_step"] == 2

    def test_of_transformers(self, loaded: Any, hub_folder: Path) -> None:
        saved = {(fqn, WEIGHT): raw(tensor) for fqn, tensor in load_file(hub_folder / "model.safetensors").items()}
        assert weights(loaded["hf"][1]) == saved

    def test_a_model_of_bfloat16_holds_the_weights(self, loaded: Any) -> None:
        assert weights(loaded["zero3-bf16"][1]) == weights(truth_of(ZERO3))

    def test_each_rank_reads_its_own_shards(self, loaded: Any) -> None:
        for name in ("zero3", "zero2", "megatron", "dcp", "hf"):
            for rank in loaded[name][0]["ranks"]:
                assert rank["read"] <= 1.1 * rank["held"] and rank["told"] is None
        for rank in loaded["zero3-bf16"][0]["ranks"]:  # stored in float32
            assert rank["read"] == 2 * rank["held"]

    def test_one_rank_says_what_is_left(self, loaded: Any) -> None:
        for name, (facts, _) in loaded.items():
            is_left = name not in ("hf", "contents")
            assert [len(rank["said"]) for rank in facts["ranks"]] == [int(is_left), 0, 0, 0], name

    def test_ranks_that_opened_another_checkpoint(self, loaded: Any) -> None:
        """The newest step of a live run may change between ranks; a copy on a node's own disk is allowed."""
        for rank in loaded["other"][0]["ranks"]:
            assert "StorageError: the ranks have opened different checkpoints" in rank["told"]
            assert "expected: step-2 (dcp), step 2, of rank 0\n  found: step-3 (dcp)" in rank["told"]
        assert [rank["told"] for rank in loaded["copy"][0]["ranks"]] == [None] * 4

    def test_ranks_that_opened_another_run_of_the_same_shapes(self, loaded: Any) -> None:
        for rank in loaded["contents"][0]["ranks"]:
            assert "StorageError: the ranks have opened different checkpoints" in rank["told"]
            assert "with other contents" in rank["told"]

    def test_all_are_told_what_is_missing(self, loaded: Any) -> None:
        for rank in loaded["missing"][0]["ranks"]:
            assert "Missing key in checkpoint state_dict: model.lm_head.bias" in rank["told"]
