"""`converters/deepspeed/universal.py`: universal checkpoints from ckpt and from DeepSpeed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.api import plan
from ckpt.errors import CorruptError, HalfError, UsageError
from ckpt.move.run import execute
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Layout, ReadRequest, TrainingState
from ckpt.plan.planner import make_plan
from ckpt.state.skipped_states import listed
from converters.deepspeed.universal import UNIVERSAL
from converters.deepspeed.zero import ZERO1, ZERO2, ZERO3
from tests.support.commands import ckpt, contents
from tests.support.damage import Fault, copied, removed
from tests.support.describing import content
from tests.support.places import FIXTURES
from tests.support.universal import ds_to_universal

STAGES = {"toy-zero1": 1, "toy-zero2": 2, "toy-zero3": 3, "lora-zero3": 3, "moe-zero3": 3, "trainer-zero2": 2}


def source(fixtures: Path, name: str) -> Checkpoint:
    folder = fixtures / name
    folder = folder / "checkpoint-2" if name.startswith("trainer") else folder
    zero = {1: ZERO1, 2: ZERO2, 3: ZERO3}[STAGES[name]]
    found = zero.find(folder, None)
    assert found is not None
    return zero.read(found, ReadRequest())


def write(checkpoint: Checkpoint, output: Path) -> Path:
    execute(make_plan(checkpoint, UNIVERSAL.lay_out(checkpoint, Layout())), output)
    found = UNIVERSAL.find(output, None)
    assert found is not None
    return found


def read(path: Path) -> Checkpoint:
    return UNIVERSAL.read(path, ReadRequest())


def loaded(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=False)


def assert_same(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert set(ours.tensors) == set(theirs.tensors)
    for key, tensor in theirs.tensors.items():
        assert content(ours.tensors[key]) == content(tensor), key
        assert ours.tensors[key].native == tensor.native, key
    assert ours.state.scalars == theirs.state.scalars
    assert ours.state.param_groups == theirs.state.param_groups
    assert (ours.state.step, ours.ties, ours.world_size) == (theirs.state.step, theirs.ties, theirs.world_size)


@pytest.mark.parametrize("name", STAGES)
def test_what_is_written_is_read_again(name: str, fixtures: Path, tmp_path: Path) -> None:
    checkpoint = source(fixtures, name)
    folder = write(checkpoint, tmp_path / "out")
    assert folder.name == f"{Path(checkpoint.path).name}_universal"
    assert (tmp_path / "out" / "latest_universal").read_text() == folder.name
    again = read(folder)
    assert_same(again, checkpoint)
    assert set(again.state.entries()) == set(checkpoint.state.entries())
    assert_same(read(write(again, tmp_path / "again")), checkpoint)


@pytest.mark.parametrize("name", STAGES)
def test_it_becomes_the_partition_files_that_it_came_from(name: str, fixtures: Path, tmp_path: Path) -> None:
    checkpoint = source(fixtures, name)
    zero = {1: ZERO1, 2: ZERO2, 3: ZERO3}[STAGES[name]]
    direct, around = tmp_path / "direct", tmp_path / "around"
    universal = read(write(checkpoint, tmp_path / "universal"))
    for one, output in ((checkpoint, direct), (universal, around)):
        execute(make_plan(one, zero.lay_out(one, Layout(world_size=2))), output)
    names = sorted(p.relative_to(direct) for p in direct.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(around) for p in around.rglob("*") if p.is_file())
    assert_same(zero.read(around / "global_step2", ReadRequest()), zero.read(direct / "global_step2", ReadRequest()))


def test_what_comes_from_no_stage_has_what_every_stage_asks_for(fixtures: Path, tmp_path: Path) -> None:
    checkpoint = source(fixtures, "lora-zero3")
    state = TrainingState(checkpoint.state.step, checkpoint.state.param_groups, checkpoint.state.scalars)
    bare = replace(checkpoint, format="other", framework=None, tag=None, state=state)
    folder = write(bare, tmp_path / "out")
    assert {p.name for p in folder.glob("*.pt")} >= {
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    }
    state = loaded(folder / "zero" / "optimizer_state.pt")
    assert state["ds_version"] and state["param_groups"]
    assert state["optimizer_state_dict"]["state"][0]["step"] == 2
    fqn = next(fqn for fqn, role in checkpoint.tensors if role == MASTER)
    assert set(loaded(folder / "zero" / fqn / "exp_avg.pt")) == {"param", "cat_dim"}
    again = read(folder)
    # Stage 3 stores no weights. The universal form has weights, rounded from the masters.
    trained = {(fqn, WEIGHT) for fqn, role in checkpoint.tensors if role == MASTER}
    assert set(again.tensors) == set(checkpoint.tensors) | trained


def test_weights_alone_keep_the_engines_hyperparameters(fixtures: Path, tmp_path: Path) -> None:
    checkpoint = source(fixtures, "lora-zero3")
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[1] in (WEIGHT, BUFFER)}
    bare = replace(checkpoint, format="other", framework=None, tag=None, tensors=tensors, state=TrainingState())
    state = loaded(write(bare, tmp_path / "out") / "zero" / "optimizer_state.pt")
    assert len(state["param_groups"]) == sum(tensor.numel > 0 for tensor in tensors.values())
    assert all(set(group) == {"params"} for group in state["param_groups"])


def test_states_that_are_not_there_are_zeros_and_said_to_be(fixtures: Path) -> None:
    """Adafactor's `exp_avg_sq` may be missing for a whole group, for example biases and norms."""
    checkpoint = source(fixtures, "toy-zero2")
    group = checkpoint.state.param_groups[0].fqns
    for without in (group, group[:1]):
        held = {
            (fqn, role): t for (fqn, role), t in checkpoint.tensors.items() if role != "exp_avg" or fqn not in without
        }
        assert len(held) + len(without) == len(checkpoint.tensors) and len(checkpoint.state.param_groups) > 1
        notes = plan(replace(checkpoint, tensors=held), "universal", Layout()).plan.target.notes
        assert f"optimizer state exp_avg of {listed(without)} is missing from the source: wrote zeros" in notes
    assert not any("zeros" in note for note in plan(checkpoint, "universal", Layout()).plan.target.notes)


def test_it_has_no_ranks(fixtures: Path) -> None:
    with pytest.raises(UsageError, match="any number of ranks can load"):
        plan(source(fixtures, "toy-zero2"), "universal", Layout(world_size=2))


def test_a_steps_own_folder_as_deepspeeds_converter_writes_it(fixtures: Path, tmp_path: Path) -> None:
    """Users keep ds_to_universal.py's `--output_folder` next to its source step."""
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "run"))
    step, out = run / "global_step2", run / "global_step2_universal"
    done = ckpt("convert", "zero2", "universal", step, "-o", out, "--step-folder", "--no-manifest")
    assert done.code == 0, done.err
    execute(
        make_plan(checkpoint := source(fixtures, "toy-zero2"), UNIVERSAL.lay_out(checkpoint, Layout())), run / "own"
    )
    assert contents(out) == contents(run / "own" / "global_step2_universal")
    assert UNIVERSAL.find(run, out.name) == out
    assert_same(read(out), checkpoint)


STATE = "parameter's optimizer state is missing"
FAULTS = {
    "no master": Fault(removed("zero/embed.weight/fp32.pt"), CorruptError, "parameter's master is missing"),
    "no moment": Fault(removed("zero/embed.weight/exp_avg.pt"), CorruptError, STATE),
    "no step": Fault(removed("zero/embed.weight/step.pt"), CorruptError, STATE),
    "no model file": Fault(removed("mp_rank_00_model_states.pt"), HalfError, "has only optimizer states"),
    "another's master": Fault(
        copied("zero/down.bias/fp32.pt", "zero/embed.weight/fp32.pt"), CorruptError, "tensor's size differs"
    ),
}


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(source(FIXTURES, "toy-zero2"), tmp_path_factory.mktemp("universal") / "out")


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named(universal: Path, tmp_path: Path, fault: str) -> None:
    copy = Path(shutil.copytree(universal, tmp_path / "damaged"))
    FAULTS[fault].check(copy, lambda: read(copy))


def test_latest_without_its_step(universal: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(universal.parent, tmp_path / "out"))
    (out / "latest_universal").write_text("elsewhere")
    with pytest.raises(CorruptError, match="names a missing step folder"):
        UNIVERSAL.find(out, None)
    assert UNIVERSAL.find(out, universal.name) == UNIVERSAL.find(out / universal.name, None) == out / universal.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "num_ranks"),
    [
        ("toy-zero3", 3, 3),  # not toy-zero1 or toy-zero2: their 0-d parameters make it fail
        ("moe-zero3", 3, 2),
        ("lora-zero3", 3, 2),
        ("trainer-zero2", 2, 2),
        ("toy-zero3", 3, 5),
        ("lora-zero3", 2, 3),
        ("trainer-zero2", 1, 3),
        ("trainer-zero2", 3, 4),
    ],
)
def test_against_deepspeeds_own_converter(
    name: str, stage: int, num_ranks: int, fixtures: Path, tmp_path: Path
) -> None:
    """The converter's output, from a run or from ckpt's files, reads like the source. ckpt writes the same files."""
    import torch

    checkpoint = source(fixtures, name)
    zero = (ZERO1, ZERO2, ZERO3)[stage - 1]
    if (stage, num_ranks) != (STAGES[name], checkpoint.world_size):
        execute(make_plan(checkpoint, zero.lay_out(checkpoint, Layout(world_size=num_ranks))), tmp_path / "zero")
        checkpoint = zero.read(tmp_path / "zero" / "global_step2", ReadRequest())
    theirs = tmp_path / "theirs" / "step_universal"
    theirs.mkdir(parents=True)
    ds_to_universal(Path(checkpoint.path), theirs)
    found = UNIVERSAL.find(theirs.parent, None)
    assert found == theirs
    assert_same(read(found), checkpoint)

    ours = write(checkpoint, tmp_path / "ours")
    files = {p.relative_to(ours) for p in ours.rglob("*.pt")}
    # DeepSpeed also writes fp32 copies of tensors without an optimizer. No loader reads them, and the model file has
    # the originals.
    copies = {
        p.relative_to(theirs)
        for p in (theirs / "zero").rglob("fp32.pt")
        if (p.parent.name, MASTER) not in checkpoint.tensors
    }
    assert files == {p.relative_to(theirs) for p in theirs.rglob("*.pt")} - copies
    for file in (file for file in files if file.parts[0] == "zero" and len(file.parts) == 3):
        a, b = loaded(ours / file), loaded(theirs / file)
        assert type(a) is type(b), file
        if isinstance(b, dict):
            assert set(a) == set(b) and a["cat_dim"] == b["cat_dim"], file
            a, b = a["param"], b["param"]
            assert a.shape == (b.shape or (1,)), file  # DeepSpeed can't load a tensor without dims
        assert a.dtype == b.dtype and torch.equal(a.reshape(-1), b.reshape(-1)), file
    a, b = (loaded(folder / "zero" / "optimizer_state.pt") for folder in (ours, theirs))
    assert set(b) - {"fp32_flat_groups"} <= set(a)
    assert a["param_groups"] == b["param_groups"]
