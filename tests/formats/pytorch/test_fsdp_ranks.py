"""`converters/pytorch/fsdp_ranks.py`, `flat_parameters.py`, `dtensors.py`: per-rank files of FSDP1 and FSDP2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt import api
from ckpt.containers.torchfile.values import Record
from ckpt.errors import CorruptError, NotFoundError
from ckpt.plan.checkpoint import Checkpoint, ReadRequest
from ckpt.plan.planner import check_source
from ckpt.plan.tiling import check_tiling
from converters.pytorch.fsdp_ranks import FSDP_RANKS
from converters.pytorch.full import FULL
from converters.pytorch.rank_parts import local_box
from tests.support.damage import Fault, copied, edited, removed
from tests.support.describing import content
from tests.support.engines import raw
from tests.support.fsdp_runs import run_ranks
from tests.support.model_files import rewriting

RUNS = ("fsdp2-2", "fsdp2-3", "hsdp-4", "tp-4", "fsdp1_untied-2", "fsdp1_untied-3", "fsdp1-2")
TIES = {"lm_head.weight": "model.embed_tokens.weight"}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: `runs("fsdp2-3")` gives the folder of an FSDP2 run on 3 ranks."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            kind, _, ranks = name.partition("-")
            made[name] = tmp_path_factory.mktemp(name)
            run_ranks(kind, int(ranks), made[name])
        return made[name]

    return run


def truth(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    full = run / "full"
    return torch.load(full / "pytorch_model_fsdp.bin"), torch.load(full / "optimizer.bin")


def assert_is_truth(checkpoint: Checkpoint, run: Path) -> None:
    weights, optimizer = truth(run)
    found = {fqn for fqn, role in checkpoint.tensors if role == "weight"}
    assert found == set(weights) - set(checkpoint.ties)
    for fqn in found:
        check_source(checkpoint.tensors[fqn, "weight"])
        assert content(checkpoint.tensors[fqn, "weight"]) == raw(weights[fqn]), fqn
    states = {(fqn, name) for fqn, values in optimizer["state"].items() for name in values if name != "step"}
    assert {key for key in checkpoint.tensors if key[1] != "weight"} == states and states
    for fqn, name in states:
        check_source(checkpoint.tensors[fqn, name])
        assert content(checkpoint.tensors[fqn, name]) == raw(optimizer["state"][fqn][name]), (fqn, name)
    assert checkpoint.state.scalars["step"] == dict.fromkeys(optimizer["state"], 3.0)
    (group,) = checkpoint.state.param_groups
    (expected,) = optimizer["param_groups"]
    assert set(group.fqns) == set(expected["params"])
    assert {k: group.options[k] for k in ("lr", "betas", "weight_decay")} == {
        k: expected[k] for k in ("lr", "betas", "weight_decay")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_live_model_gathered(runs: Callable[[str], Path], name: str) -> None:
    run = runs(name)
    if name.startswith("fsdp1-"):  # FSDP1 writes tied parameters twice
        (run / "ranks/config.json").write_text(json.dumps(CONFIG))
    checkpoint = api.open(run / "ranks")
    assert checkpoint.format == "fsdp-ranks"
    assert checkpoint.ties == ({} if "untied" in name else TIES)
    assert checkpoint.world_size == int(name[-1])
    assert_is_truth(checkpoint, run)
    assert checkpoint.state.lr_scheduler["last_epoch"] == 0
    assert set(checkpoint.state.per_rank["rng_state"]) == {str(rank) for rank in range(checkpoint.world_size)}
    replicated = [tensor.fqn for tensor in checkpoint.tensors.values() if tensor.replicas]
    assert bool(replicated) == (name in ("hsdp-4", "tp-4", "fsdp1-2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_converts_to_full(runs: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    run = runs(name)
    if name.startswith("fsdp1-"):
        (run / "ranks/config.json").write_text(json.dumps(CONFIG))
    api.plan(api.open(run / "ranks"), "full").run(tmp_path / "out")
    weights, optimizer = truth(run)
    ours = torch.load(tmp_path / "out/pytorch_model_fsdp.bin", weights_only=True)
    assert set(ours) == set(weights)
    assert all(raw(ours[fqn]) == raw(weights[fqn]) for fqn in weights)
    assert all(ours[alias].data_ptr() == ours[owner].data_ptr() for alias, owner in TIES.items()) or "untied" in name
    states = torch.load(tmp_path / "out/optimizer.bin", weights_only=True)
    assert states["state"].keys() == optimizer["state"].keys()
    for fqn, values in optimizer["state"].items():
        assert {k: raw(v) for k, v in values.items()} == {k: raw(v) for k, v in states["state"][fqn].items()}


@pytest.mark.slow
def test_ties_are_not_told_from_equal_values(runs: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs("fsdp1-2") / "ranks", tmp_path / "run", ignore=lambda *_: ["config.json"]))
    checkpoint = api.open(folder)
    assert not checkpoint.ties and ("lm_head.weight", "weight") in checkpoint.tensors
    assert not checkpoint.optimizer_states and any("left out" in note for note in checkpoint.notes)
    assert {v: raw(truth(runs("fsdp1-2"))[0][v]) for v in TIES} == {
        v: content(checkpoint.tensors[v, "weight"]) for v in TIES
    }


@pytest.mark.slow
def test_local_state_dicts_of_unknown_models_are_refused(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = runs("local-2")
    with pytest.raises(NotFoundError, match="LOCAL_STATE_DICT"):
        api.open(run / "ranks")
    for rank in range(2):  # the same content under names for sharded state
        source = run / "ranks" / f"pytorch_model_fsdp_rank{rank}.bin"
        shutil.copy(source, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(NotFoundError, match="LOCAL_STATE_DICT"):
        api.open(tmp_path)


@pytest.mark.slow
def test_verls_folders(runs: Callable[[str], Path], tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(runs("fsdp2-2") / "ranks", tmp_path / f"global_step_{step}/actor")
    (tmp_path / "global_step_9/actor/huggingface").mkdir()
    (tmp_path / "global_step_9/actor/huggingface/config.json").write_text(json.dumps(CONFIG))
    assert Path(api.open(tmp_path).path) == tmp_path / "global_step_10/actor"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    checkpoint = api.open(tmp_path)
    assert Path(checkpoint.path) == tmp_path / "global_step_9/actor"
    assert checkpoint.state.step == 9 and checkpoint.config == CONFIG
    assert api.open(tmp_path, tag="global_step_10").state.step == 10
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("11")
    with pytest.raises(CorruptError, match="names a missing step folder"):
        api.open(tmp_path)


def truncated(folder: Path) -> None:
    path = folder / MODEL.format(1)
    path.write_bytes(path.read_bytes()[:-100])


def another_step(state: dict[str, Any]) -> None:
    state["state"][0]["step"] += 1


MODEL, OPTIMIZER = "model_world_size_3_rank_{}.pt", "optim_world_size_3_rank_{}.pt"
MISSING = "rank files are missing"
FAULTS = {
    "no rank 1": Fault(removed(MODEL.format(1)), CorruptError, MISSING),
    # no gap in the numbers, but fsdp_config.json and the names record the count
    "no last rank": Fault(removed(MODEL.format(2)), CorruptError, MISSING),
    "left over": Fault(
        copied(MODEL.format(0), "model_world_size_4_rank_3.pt"), CorruptError, "different numbers of ranks"
    ),
    "truncated": Fault(truncated, CorruptError, "truncated"),
    "another step": Fault(edited(OPTIMIZER.format(2), another_step), CorruptError, "different steps"),
    "a rank twice": Fault(copied(MODEL.format(0), MODEL.format(1)), CorruptError, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs("fsdp2-3") / "ranks", tmp_path / "ranks"))
    error = FAULTS[fault].check(folder, lambda: api.plan(api.open(folder), "hf"))
    assert fault != "no rank 1" or error.rank == "1"


@pytest.mark.slow
def test_numbers_without_names_are_left_out(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """With two param groups, the script alone knows the order of their parameters."""
    folder = Path(shutil.copytree(runs("fsdp2-2") / "ranks", tmp_path / "groups"))
    for rank in range(2):
        path = folder / f"optim_world_size_2_rank_{rank}.pt"
        with rewriting(path) as state:
            first, numbers = state["param_groups"][0], state["param_groups"][0]["params"]
            state["param_groups"] = [{**first, "params": numbers[:4]}, {**first, "params": numbers[4:]}]
    checkpoint = api.open(folder)
    assert not checkpoint.optimizer_states and not checkpoint.state.param_groups
    assert any("left out" in note and "numbered" in note for note in checkpoint.notes)

    names = [fqn for fqn, _ in checkpoint.tensors]
    for rank in range(2):  # as recorded by torch since 2.6
        path = folder / f"optim_world_size_2_rank_{rank}.pt"
        with rewriting(path) as state:
            state["param_groups"][0]["param_names"] = names[:4]
            state["param_groups"][1]["param_names"] = names[4:]
    checkpoint = api.open(folder)
    assert [group.fqns for group in checkpoint.state.param_groups] == [tuple(names[:4]), tuple(names[4:])]
    assert checkpoint.optimizer_states == ("exp_avg", "exp_avg_sq", "step")


def placement(name: str, **state: int) -> Record:
    return Record("torch.distributed.tensor.placement_types", name, state=state)


@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    mesh=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_boxes_of_all_coordinates_tile(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    from itertools import product

    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    plain = [placement("Shard", dim=dim) for dim in dims]
    inner = 1
    for axis in range(len(mesh) - 1, 0, -1):
        inner *= mesh[axis] if dims[axis] == dims[0] else 1
    placements = [placement("_StridedShard", dim=dims[0], split_factor=inner), *plain[1:]]
    for placed in (plain, placements):
        boxes = [local_box(shape, mesh, at, placed) for at in product(*map(range, mesh))]
        assert check_tiling([box for box in boxes if box.numel], shape) is None


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(NotFoundError, match="sum"):
        local_box((4,), (2,), (0,), [placement("Partial")])
    with pytest.raises(NotFoundError, match="unknown order"):
        local_box((8,), (2, 2), (0, 0), [placement("_StridedShard", dim=0, split_factor=4), placement("Shard", dim=0)])


def test_nothing_here(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")  # Megatron's
    assert FSDP_RANKS.find(tmp_path, None) is None
    assert FULL.find(tmp_path, None) is None
    torch.save([1], tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(CorruptError, match="not a state dict"):
        FSDP_RANKS.read(tmp_path, ReadRequest())


@pytest.mark.slow
def test_a_buffer_that_each_rank_keeps_for_itself(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """FSDP synchronizes parameters, but not buffers. ckpt reads rank 0's values, with a note."""
    run = shutil.copytree(runs("fsdp2-2"), tmp_path / "run")
    for file in run.rglob("model_world_size_2_rank_*.pt"):
        with rewriting(file) as model:
            model["norm.running_mean"] = torch.full((3,), float(file.stem[-1]))
    checkpoint = api.open(run, "fsdp-ranks")
    assert content(checkpoint.tensors["norm.running_mean", "weight"]) == raw(torch.zeros(3))
    assert any("every rank saved its own values of 1 buffer" in note for note in checkpoint.notes)
    assert api.verify(checkpoint, checkpoint).equal
