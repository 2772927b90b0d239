"""`converters/pytorch/torch_checkpointing.py`: real saves by torch_checkpointing 0.1.1, and damaged ones."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import api
from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt.runs.unread_files import list_unread
from tests.support.commands import ckpt as command_line
from tests.support.damage import Damage, Fault, copied, removed
from tests.support.places import FIXTURES

RUN = FIXTURES / "torch-checkpointing"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))


def test_training_state(run: Path) -> None:
    for step in (2, 3):
        state = api.open(run / f"step-{step}").state
        assert state.step == step
        assert {*state.scalars["step"].values()} == {float(step)}
        assert state.lr_scheduler["last_epoch"] == step
        assert state.private["torch"]["dataloader"] == {"dp_rank_0": step * 4, "dp_rank_1": step * 4}
        assert state.param_groups[0].options["lr"] == pytest.approx(0.01 / (step + 1))
        assert len(state.param_groups[0].fqns) == 21


def test_other_ranks_resume_a_conversion(run: Path) -> None:
    """Its own loader keeps the new run's lr on other ranks, and found no step_2.pt for a third rank (0.1.1)."""
    for ranks in (1, 2, 3):
        notes: list[str] = []
        resumed = ckpt.resume(run, world_size=ranks, say=notes.append)
        assert (resumed == str(run / "step-3")) == (ranks == 2)
        assert any("not carried from 2 ranks" in note for note in notes) == (ranks != 2)
        assert api.open(resumed).world_size == ranks
        assert ckpt.verify(run, resumed).equal


def test_a_proved_data_position_is_converted(run: Path) -> None:
    loaders = api.open(FIXTURES / "torchtitan-loader" / "step-4").state.private["torch"]["dataloader"]
    import torch

    for rank in range(2):
        torch.save({f"dp_rank_{rank}": loaders[f"dp_rank_{rank}"]}, run / f"step-3/dataloader_{rank}.pt")
    resumed = ckpt.resume(run, world_size=4)
    converted = api.open(resumed).state.private["torch"]["dataloader"]
    assert converted.keys() == {f"dp_rank_{rank}" for rank in range(4)}


def test_newest_step_is_taken(run: Path) -> None:
    assert api.open(run).state.step == 3


def test_ranks_values_are_kept_apart(run: Path) -> None:
    """A rank's own value of one name has no common form."""
    import torch

    for rank in range(2):
        torch.save({"seed": rank}, run / f"step-2/random_{rank}.pt")
    assert api.open(run / "step-2").state.per_rank["random"] == {"0": {"seed": 0}, "1": {"seed": 1}}


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("items", [*combinations(["step", "lr_scheduler", "dataloader"], 2)], ids="-".join)
def test_files_of_two_items_are_exchanged(run: Path, items: tuple[str, str], ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        one, other = (run / f"step-3/{item}_{rank}.pt" for item in items)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with pytest.raises(CorruptError, match="another item's content") as caught:
        api.open(run / "step-3")
    assert caught.value.path is not None and Path(caught.value.path).name in {
        f"{item}_{rank}.pt" for item in items for rank in ranks
    }
    for command in ("check", "resume"):
        assert command_line(command, run / "step-3").code == 4


@pytest.mark.parametrize(
    "content",
    [
        {"step": 3},  # nothing else looks like the step's number
        {"best": 0.5},  # a schedule has an epoch, too
        [3],
    ],
)
@pytest.mark.parametrize("item", ["step", "lr_scheduler", "dataloader", "metrics"])
def test_an_item_with_unusual_content_is_no_other_items(run: Path, item: str, content: object) -> None:
    import torch

    for rank in range(2):
        torch.save(content, run / f"step-3/{item}_{rank}.pt")
    assert api.open(run / "step-3").format == "torch-checkpointing"


@pytest.mark.parametrize("item", ["step_lr", "step_scheduler", "iteration_lr"])
def test_a_schedule_may_be_named_after_steps(run: Path, item: str) -> None:
    for rank in range(2):
        (run / f"step-3/lr_scheduler_{rank}.pt").rename(run / f"step-3/{item}_{rank}.pt")
    assert api.open(run / "step-3").state.step == 3
    for rank in range(2):
        shutil.copy(run / f"step-3/{item}_{rank}.pt", run / f"step-3/step_{rank}.pt")
    with pytest.raises(CorruptError, match="another item's content"):
        api.open(run / "step-3")


def test_item_without_a_ranks_file_is_not_read(run: Path) -> None:
    (run / "step-2/dataloader_1.pt").unlink()
    checkpoint = api.open(run / "step-2")
    assert "dataloader" not in checkpoint.state.entries()
    assert [file.name for file in list_unread(checkpoint)] == ["dataloader_0.pt"]


def test_staged_save_is_incomplete(run: Path) -> None:
    shutil.copytree(run / "step-3", run / "tmp_step-4")
    with pytest.raises(IncompleteError, match="has not ended"):
        api.open(run / "tmp_step-4")
    (run / "tmp_step-4/metadata.pkl").unlink()
    with pytest.raises(IncompleteError, match="has not ended"):
        api.open(run / "tmp_step-4")
    found = api.open(run)
    assert found.state.step == 3
    assert any("tmp_step-4 is skipped" in note for note in found.notes)


def test_other_folders_with_its_prefix_are_no_steps(run: Path) -> None:
    """A folder called tmp_ is somebody else's if it holds no rank files."""
    shutil.rmtree(run / "step-2")
    (run / "tmp_step-4").mkdir()
    (run / "tmp_step-4/notes.txt").write_text("")
    assert not [note for note in api.open(run).notes if "tmp_" in note]


@pytest.mark.parametrize("number", [2, 3])
def test_missing_metadata(run: Path, number: int) -> None:
    """Files called model_0.safetensors and step_1.pt are no model and no step."""
    step = run / f"step-{number}"
    (step / "metadata.pkl").unlink()
    with pytest.raises(IncompleteError, match=r"metadata\.pkl is missing"):
        api.open(step)
    assert Path(api.open(run).path).name == ("step-3" if number == 2 else "step-2")
    assert {one.path: one.state for one in ckpt.check(run).checkpoints}[step.name] == "incomplete"


def metadata(change: Callable[[Any], object]) -> Damage:
    """Return damage that edits what metadata.pkl records."""

    def damage(step: Path) -> None:
        content = pickle.loads((step / "metadata.pkl").read_bytes())
        change(content)
        (step / "metadata.pkl").write_bytes(pickle.dumps(content))

    return damage


def hostile(step: Path) -> None:
    (step / "metadata.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def unknown_sharding(content: Any) -> None:
    groups = next(iter(content["metadata"]["model"]["nested_path_to_metadata"].values()))
    groups[0]["sharding_metadata"]["type"] = "default_tensor_v1"


def outside(content: Any) -> None:
    layout = content["metadata"]["model"]["rank_to_layout_info"]
    layout[1] = {"file_path": "../step-2/model_1.pt", "serialization_format": {"type": "TorchSerialization"}}


MISSING, LISTED = "a rank's file is missing", "a tensor listed in metadata.pkl is missing"
CONTRADICTS, UNKNOWN = "contradicts metadata.pkl", "no known version"
#: Local tensors have no place of their own, so step 3 is told by its sizes: the
#: embedding's 19 rows make rank 1's part shorter.
FAULTS = {
    "step-2": {
        "no model of rank 1": Fault(removed("model_1.pt"), IncompleteError, MISSING),
        "no optimizer of rank 0": Fault(removed("optimizer_0.pt"), IncompleteError, MISSING),
        "rank 0's model as rank 1's": Fault(copied("model_0.pt", "model_1.pt"), CorruptError, CONTRADICTS),
        "a third rank": Fault(copied("model_1.pt", "model_2.pt"), CorruptError, "different numbers of ranks"),
        "unknown sharding": Fault(metadata(unknown_sharding), NotFoundError, "cut in an unknown way"),
        "no metadata in its file": Fault(metadata(lambda content: content.pop("metadata")), CorruptError, UNKNOWN),
        "another world size": Fault(metadata(lambda content: content.update(world_size=3)), CorruptError, UNKNOWN),
        "a pickle that runs code": Fault(hostile, UnsafeError, "the pickle names os.system"),
        "a path out of the folder": Fault(metadata(outside), UnsafeError, "leads out of"),
    },
    "step-3": {
        "rank 0's model as rank 1's": Fault(
            copied("model_0.safetensors", "model_1.safetensors"), CorruptError, CONTRADICTS
        ),
        "another step's optimizer": Fault(copied("../step-2/optimizer_1.pt", "optimizer_1.pt"), CorruptError, LISTED),
    },
}


@pytest.mark.parametrize(("step", "fault"), [(step, fault) for step, faults in FAULTS.items() for fault in faults])
def test_damage_is_refused(run: Path, step: str, fault: str) -> None:
    FAULTS[step][fault].check(run / step, lambda: api.open(run / step))


def test_mesh_with_replicas(run: Path) -> None:
    """Strided and replicated placements are read like torch's own."""
    from converters.pytorch.torch_checkpointing import _rank_places

    mesh = {"device_type": "cpu", "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3), "mesh_dim_names": None}
    placements = [{"type": "StridedShard", "dim": 0, "split_factor": 2}, {"type": "Shard", "dim": 0}]
    data = {"global_shape": [6, 2], "dtype": "torch.float32", "stride": [2, 1], "mesh_spec": mesh}
    group = {
        "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data | {"placements": placements}},
        "ranks": (0, 1, 2, 3),
    }
    assert [(rank, place.box.offsets[0], place.box.sizes[0]) for rank, place in _rank_places(group)] == [
        (0, 0, 2),
        (1, 3, 2),
        (2, 2, 1),
        (3, 5, 1),
    ]
