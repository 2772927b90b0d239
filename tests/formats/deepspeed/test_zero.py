"""`converters/deepspeed/zero.py`, `folder.py`, `model.py`, `model_file.py`, `rank_files.py`: the ZeRO reader.

Sources are the committed checkpoints, and layouts that current DeepSpeed no longer writes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.commands.check.checking import check
from ckpt.containers.torchfile import read as torchfile
from ckpt.errors import CorruptError, NotFoundError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Layout
from ckpt.plan.dtypes import FLOAT32
from ckpt.views.loading import load_into
from tests.support import commands
from tests.support.building import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RANK_MODEL_NAME,
    Groups,
    assert_holds,
    assert_weights,
    groups_of,
    slot,
    write_stage2,
    write_stage3,
)
from tests.support.commands import ckpt
from tests.support.describing import assert_equals_truth, content
from tests.support.engines import Truth, raw
from tests.support.model_files import edit, rewriting

TOYS = ("toy-zero1", "toy-zero2", "toy-zero3")
RUNS = {**dict.fromkeys(TOYS, 3), "moe-zero3": 2, "lora-zero3": 2, "trainer-zero2": 2}

GROUPS = groups_of({"a.weight": (5, 7), "b.weight": (3,), "c": ()}, {"a.bias": (2,), "d.weight": (4, 1, 3)})
SIZES = [pytest.param(1, id="w1"), pytest.param(2, id="w2"), pytest.param(3, id="w3"), pytest.param(17, id="w17")]


def truth_of(run: Path, step: int = 2) -> Truth:
    return Truth.load(run / "truth" / f"global_step{step}.safetensors")


# -- real checkpoints --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_live_engine_gathered(fixtures: Path, name: str) -> None:
    run = fixtures / name
    truth = truth_of(run)
    checkpoint = api.open(run)
    assert assert_equals_truth(checkpoint, truth) >= 30
    assert checkpoint.format == name.rpartition("-")[2]
    assert checkpoint.ties == truth.ties
    assert checkpoint.world_size == RUNS[name] == truth.metadata["world_size"]
    assert checkpoint.state.step == truth.metadata["step"] == 2
    assert checkpoint.framework == "deepspeed 0.19.8"


@pytest.mark.parametrize("name", RUNS)
def test_param_groups_and_scalars_are_by_name(fixtures: Path, name: str) -> None:
    checkpoint, truth = api.open(fixtures / name), truth_of(fixtures / name)
    expected = truth.metadata["param_groups"]
    assert [sorted(group.fqns) for group in checkpoint.state.param_groups] == [sorted(g["names"]) for g in expected]
    for ours, theirs in zip(checkpoint.state.param_groups, expected, strict=True):
        names = ("lr", "weight_decay", "eps")
        assert [ours.options[n] for n in names] == [theirs[n] for n in names]
    trained = [fqn for group in checkpoint.state.param_groups for fqn in group.fqns]
    assert checkpoint.state.scalars == {"step": dict.fromkeys(trained, 2.0)}
    assert checkpoint.optimizer_states == ("exp_avg", "exp_avg_sq", "step")


def test_the_toys_ties_and_buffers(fixtures: Path) -> None:
    """Every stage has a tie, buffers in four dtypes, a 0-d parameter and an empty parameter."""
    for name in TOYS:
        checkpoint = api.open(fixtures / name)
        assert checkpoint.ties == {"head.weight": "embed.weight"}
        assert ("head.weight", WEIGHT) not in checkpoint.tensors
        buffers = {tensor.fqn: tensor.dtype.name for tensor in checkpoint.with_role(BUFFER)}
        assert buffers == {"seen": "int64", "mask": "bool", "mean": "float32", "shift": "bfloat16"}
        assert checkpoint.tensors["scale", MASTER].shape == ()
        assert not {key for key in checkpoint.tensors if key[0] == "scratch"}


def test_a_config_beside_the_checkpoint_is_found(fixtures: Path) -> None:
    checkpoint = api.open(fixtures / "trainer-zero2")
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] == "qwen2"
    assert checkpoint.namespace == "transformers"
    assert api.open(fixtures / "toy-zero1").config is None


# -- choice of the step ------------------------------------------------------------------------------------------------
def test_the_newest_checkpoint_of_a_trainer_folder_is_taken_and_named(fixtures: Path) -> None:
    run = fixtures / "trainer-zero2"
    checkpoint = api.open(run)
    assert checkpoint.path == str(run / "checkpoint-2" / "global_step2")
    assert checkpoint.notes == ("taking checkpoint-2/global_step2",)


@pytest.mark.parametrize("inside", ["", "checkpoint-1", "checkpoint-1/global_step1"])
def test_an_older_checkpoint_can_be_asked_for(fixtures: Path, inside: str) -> None:
    run = fixtures / "trainer-zero2"
    checkpoint = api.open(run / inside) if inside else api.open(run, tag="checkpoint-1")
    assert checkpoint.state.step == 1
    assert_equals_truth(checkpoint, truth_of(run, 1))
    assert not any("there is also" in note for note in checkpoint.notes)


def test_checkpoint_numbers_are_numbers(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-zero2" / "checkpoint-1", run / "checkpoint-9")
    shutil.copytree(fixtures / "trainer-zero2" / "checkpoint-2", run / "checkpoint-10")
    taken, renamed = api.open(run).notes
    assert taken == "taking checkpoint-10/global_step2" and "its files are from step 2: was it renamed" in renamed


def without_a_rank(checkpoint: Path) -> None:
    next(checkpoint.rglob("*rank_1_*optim_states.pt")).unlink()


def without_latest(checkpoint: Path) -> None:
    (checkpoint / "latest").unlink()


def without_step_folder(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "global_step2")


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


@pytest.mark.parametrize("damage", [without_a_rank, without_latest, without_step_folder, emptied])
def test_an_incomplete_newest_checkpoint_is_skipped_and_named(
    fixtures: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    damage(run / "checkpoint-2")
    checkpoint = api.open(run)
    assert checkpoint.state.step == 1
    assert checkpoint.notes[0] == "taking checkpoint-1/global_step1"
    assert checkpoint.notes[1].startswith("checkpoint-2 is skipped")
    with pytest.raises((CorruptError, NotFoundError)):
        api.open(run, tag="checkpoint-2")


def test_latest_decides_and_a_newer_step_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 9):  # as text, 9 is larger
        write_stage2(run, GROUPS, 2, tag=f"global_step{step}")
    checkpoint = api.open(run)
    assert Path(checkpoint.path).name == "global_step9"
    assert checkpoint.notes[1] == "global_step9 is recorded in `latest`; there is also global_step10 (tag takes it)"
    assert Path(api.open(run, tag="global_step10").path).name == "global_step10"
    assert api.open(run / "global_step10").notes == ()


def test_a_tag_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    run = write_stage2(tmp_path / "run", GROUPS, 2)
    with pytest.raises(NotFoundError) as caught:
        api.open(run, tag="global_step3")
    assert "global_step2" in str(caught.value.hint)


def test_the_tag_of_accelerate(tmp_path: Path) -> None:
    checkpoint = api.open(write_stage3(tmp_path / "run", GROUPS, 2, tag="pytorch_model"))
    assert_holds(checkpoint, GROUPS)


# -- partitions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_every_number_of_ranks(tmp_path: Path, write: Callable[..., Path], num_ranks: int) -> None:
    """With 17 ranks, file names of ranks 10 to 16 sort before rank 2, and most ranks have only padding."""
    checkpoint = api.open(write(tmp_path / "run", GROUPS, num_ranks))
    assert checkpoint.world_size == num_ranks
    assert_holds(checkpoint, GROUPS)
    if write is write_stage2:
        assert_weights(checkpoint, GROUPS)


@pytest.mark.parametrize("name", ["bf16_" + OPTIMIZER_NAME, "fp16_" + OPTIMIZER_NAME])
@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_prefixes_of_file_names(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    assert_holds(api.open(write(tmp_path / "run", GROUPS, 3, name=name)), GROUPS)


@pytest.mark.parametrize("toy", TOYS)
def test_each_file_is_parsed_once(fixtures: Path, monkeypatch: pytest.MonkeyPatch, toy: str) -> None:
    """The order of ZeRO formats doesn't matter, because finding the stage reads the files anyway."""
    parsed: list[str] = []
    read = torchfile.read
    monkeypatch.setattr(torchfile, "read", lambda path, **more: parsed.append(str(path)) or read(path, **more))
    assert api.open(fixtures / toy).format == toy.removeprefix("toy-")
    assert len(parsed) == len(set(parsed)) > 1


@pytest.mark.parametrize("left", [(1, "mp_rank_00"), (2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")])
def test_the_stage_is_that_of_the_optimizer_files_whatever_an_earlier_run_left(
    fixtures: Path, tmp_path: Path, left: tuple[int, str]
) -> None:
    """Accelerate reuses one folder, so it may contain model files from two stages."""
    stage, name = left
    run = tmp_path / "run"
    shutil.copytree(fixtures / f"toy-zero{stage}", run)
    for step in run.glob("global_step*"):
        for other in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            if not (step / other).exists():
                shutil.copy(step / f"{name}_model_states.pt", step / other)
    assert api.open(run).format == api.open(run, f"zero{stage}").format == f"zero{stage}"
    for other_stage in {1, 2, 3} - {stage}:
        with pytest.raises(NotFoundError) as caught:
            api.open(run, f"zero{other_stage}")
        assert caught.value.hint == f"this looks like zero{stage}"


def test_old_names_without_an_underscore(tmp_path: Path) -> None:
    run = write_stage2(tmp_path / "run", GROUPS, 11, name="zero_pp_rank_{}_mp_rank_00optim_states.pt")
    assert_holds(api.open(run), GROUPS)


def elastic(inner: dict[str, Any], rank: int) -> None:
    """Keep unpadded states in a list of dicts, without param groups (stage_1_and_2.py, `_get_base_optimizer_state`)."""
    states = []
    for number, kept in enumerate(inner["single_partition_of_fp32_groups"]):
        state = inner["base_optimizer_state"]["state"][number]
        states.append({name: value[: len(kept)] if value.dim() else value for name, value in state.items()})
    inner["base_optimizer_state"] = states


def elastic_step_in_groups(inner: dict[str, Any], rank: int) -> None:
    elastic(inner, rank)
    steps = [state.pop("step") for state in inner["base_optimizer_state"]]
    inner["base_optimizer_state_step"] = steps[0].item()


def elastic_with_two_steps(inner: dict[str, Any], rank: int) -> None:
    """Add the step at which the groups started. DeepSpeed's own Adam keeps it and counts in its states."""
    elastic(inner, rank)
    inner["base_optimizer_state_step"] = 0


@pytest.mark.parametrize("change", [elastic, elastic_step_in_groups, elastic_with_two_steps])
@pytest.mark.parametrize("num_ranks", SIZES)
def test_elastic_checkpoints(tmp_path: Path, num_ranks: int, change: Callable[..., None]) -> None:
    checkpoint = api.open(write_stage2(tmp_path / "run", GROUPS, num_ranks, change=change))
    assert_holds(checkpoint, GROUPS)
    assert checkpoint.state.scalars["step"]["a.weight"] == 2.0
    assert [group.fqns for group in checkpoint.state.param_groups] == [tuple(group) for group in GROUPS]


def bf16_optimizer(inner: dict[str, Any], rank: int) -> None:
    """Remove the stage and pad the partitions (runtime/bf16_optimizer.py, `state_dict`)."""
    del inner["zero_stage"], inner["loss_scaler"], inner["param_alignment_paddings"]
    kept = inner["single_partition_of_fp32_groups"]
    inner["single_partition_of_fp32_groups"] = [
        torch.cat([part, torch.zeros(padding)]) for part, padding in zip(kept, inner["group_paddings"], strict=True)
    ]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_bf16_optimizer(tmp_path: Path, num_ranks: int) -> None:
    run = write_stage2(tmp_path / "run", GROUPS, num_ranks, change=bf16_optimizer, name="bf16_" + OPTIMIZER_NAME)
    checkpoint = api.open(run)
    assert checkpoint.format == "zero1"
    assert_holds(checkpoint, GROUPS)


def paddings_of_the_last_rank(num_ranks: int, stateless: bool) -> Callable[..., None]:
    """Return an edit for DeepSpeed before 0.16.4: the last rank alone records and strips the whole group's padding."""

    def change(inner: dict[str, Any], rank: int) -> None:
        partitions = zip(inner["single_partition_of_fp32_groups"], inner["group_paddings"], GROUPS, strict=True)
        kept, paddings = [], []
        for part, padding, group in partitions:
            size = len(part) + padding
            total = size * num_ranks - sum(t.numel() for t in group.values())
            padded = torch.cat([part, torch.zeros(padding)])
            kept.append(padded[: size - total].clone() if rank == num_ranks - 1 else padded)
            paddings.append(total if rank == num_ranks - 1 else 0)
        inner["single_partition_of_fp32_groups"], inner["group_paddings"] = kept, paddings
        if stateless:
            inner["base_optimizer_state"]["state"] = {}

    return change


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("stateless", [False, True], ids=["adam", "sgd"])
def test_paddings_that_only_the_last_rank_records(tmp_path: Path, num_ranks: int, stateless: bool) -> None:
    change = paddings_of_the_last_rank(num_ranks, stateless)
    checkpoint = api.open(write_stage2(tmp_path / "run", GROUPS, num_ranks, change=change))
    assert_holds(checkpoint, GROUPS, () if stateless else ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("num_ranks", SIZES)
def test_parameters_that_are_aligned(tmp_path: Path, num_ranks: int) -> None:
    checkpoint = api.open(write_stage2(tmp_path / "run", GROUPS, num_ranks, alignment=8))
    assert_holds(checkpoint, GROUPS)


def test_param_shapes_as_one_dict(tmp_path: Path) -> None:
    groups = GROUPS[:1]

    def old(model: dict[str, Any], rank: int) -> None:
        model["param_shapes"] = model["param_shapes"][0]

    assert_holds(api.open(write_stage2(tmp_path / "run", groups, 2, change_model=old)), groups)


def test_what_old_versions_did_not_record(tmp_path: Path) -> None:
    def old(inner: dict[str, Any], rank: int) -> None:
        for key in ("base_optimizer_state", "ds_version", "param_alignment_paddings"):
            del inner[key]

    def old_model(model: dict[str, Any], rank: int) -> None:
        for key in ("ds_version", "shared_params", "frozen_param_shapes", "frozen_param_fragments", "skipped_steps"):
            del model[key]

    run = write_stage2(tmp_path / "run", GROUPS, 3, change=old, change_model=old_model)
    for path in (run / "global_step2").glob("*optim_states.pt"):
        torch.save({"optimizer_state_dict": torch.load(path)["optimizer_state_dict"]}, path)
    checkpoint = api.open(run)
    assert_holds(checkpoint, GROUPS, ())
    assert checkpoint.framework == "deepspeed"
    assert checkpoint.optimizer_states == ()


def test_a_mics_checkpoint_has_fewer_partitions_than_ranks(tmp_path: Path) -> None:
    def mics(model: dict[str, Any], rank: int) -> None:
        model["dp_world_size"] = 8

    checkpoint = api.open(write_stage3(tmp_path / "run", GROUPS, 2, change_model=mics))
    assert checkpoint.world_size == 2
    assert_holds(checkpoint, GROUPS)


# -- NVMe offload ------------------------------------------------------------------------------------------------------
def offloaded(run: Path, num_ranks: int) -> Path:
    """Write state like swap_tensor/optimizer_utils.py. A `ds_id` names each file.

    The second sub-group is too small to be offloaded.
    """

    def change(inner: dict[str, Any], rank: int) -> None:
        folder = run / "global_step2" / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)

        def swap_out(tensor: torch.Tensor, ds_id: str) -> torch.Tensor:
            padding = -tensor.numel() % 256
            data = torch.cat([tensor, torch.full((padding,), torch.nan)])
            (folder / f"{ds_id}.tensor.swp").write_bytes(data.numpy().tobytes())
            empty = torch.empty(0)
            empty.ds_id = ds_id  # type: ignore[attr-defined]
            return empty

        flats, states = inner["fp32_flat_groups"], inner["optimizer_state_dict"]["state"]
        flats[0] = swap_out(flats[0], "0_2")
        flats[1].ds_id = "3_4"
        for name in ("exp_avg", "exp_avg_sq"):
            states[0][name] = swap_out(states[0][name], f"{name}-0_2")

    return write_stage3(run, GROUPS, num_ranks, change=change)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_optimizer_states_that_were_offloaded_to_nvme(tmp_path: Path, num_ranks: int) -> None:
    checkpoint = api.open(offloaded(tmp_path / "run", num_ranks))
    assert_holds(checkpoint, GROUPS)
    files = {Path(f.extent.path).name for f in checkpoint.tensors["a.weight", "exp_avg"].fragments()}
    assert files == {"exp_avg-0_2.tensor.swp"}


@pytest.mark.parametrize("length", [None, 0, 4])
def test_an_offloaded_file_that_is_missing_or_short(tmp_path: Path, length: int | None) -> None:
    run = offloaded(tmp_path / "run", 2)
    path = run / "global_step2" / "offloaded_tensors" / "rank01" / "exp_avg-0_2.tensor.swp"
    if length is None:
        path.unlink()
    else:
        path.write_bytes(b"\0" * length)
    with pytest.raises(CorruptError) as caught:
        api.open(run)
    assert (caught.value.path, caught.value.rank) == (str(path), 1)


# -- other contents of a checkpoint ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TOYS)
def test_client_state_is_carried(fixtures: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    for path in (run / "global_step2").glob("*model_states.pt"):
        edit(path, lambda saved: saved.update(iteration=7, tokens={"seen": 5}))
    state = api.open(run).state
    assert state.client_state == {"iteration": 7, "tokens": {"seen": 5}}
    assert state.lr_scheduler["last_batch_iteration"] == 1  # DeepSpeed's schedulers count from -1
    assert state.loss_scaler.get("cur_scale") == 1.0


def test_extra_state_of_modules_is_carried(tmp_path: Path) -> None:
    def add(model: dict[str, Any], rank: int) -> None:
        model["module"]["fp8._extra_state"] = {"scale": torch.ones(2), "recipe": "delayed"}

    checkpoint = api.open(write_stage2(tmp_path / "run", GROUPS, 2, change_model=add))
    assert (checkpoint.state.extra_state or {})["fp8._extra_state"]["recipe"] == "delayed"
    assert_holds(checkpoint, GROUPS)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_frozen_parameters_of_stage_3(tmp_path: Path, num_ranks: int) -> None:
    """Each rank has a slot of each frozen parameter. Since 0.19.6 the list includes empty trainable parameters."""
    frozen = {"base.weight": torch.randn(3, 5).bfloat16(), "none": torch.empty(0, 4).bfloat16()}

    def add(model: dict[str, Any], rank: int) -> None:
        model["module"] |= {fqn: torch.empty(0, dtype=torch.bfloat16) for fqn in frozen}
        model["frozen_param_shapes"] = OrderedDict((fqn, t.shape) for fqn, t in frozen.items())
        model["frozen_param_fragments"] = {fqn: slot(t, rank, num_ranks) for fqn, t in frozen.items()}

    checkpoint = api.open(write_stage3(tmp_path / "run", GROUPS, num_ranks, change_model=add))
    assert_holds(checkpoint, GROUPS)
    assert {t.fqn: content(t) for t in checkpoint.with_role(WEIGHT)} == {fqn: raw(t) for fqn, t in frozen.items()}


def test_a_placeholder_that_nothing_describes_is_no_parameter_without_elements(tmp_path: Path) -> None:
    def add(model: dict[str, Any], rank: int) -> None:
        model["module"]["base.weight"] = torch.empty(0, dtype=torch.bfloat16)

    with pytest.raises(CorruptError, match="stored nowhere") as caught:
        api.open(write_stage3(tmp_path / "run", GROUPS, 2, change_model=add))
    assert caught.value.fqn == "base.weight"


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
@pytest.mark.parametrize("owner", ["gone.weight", "alias.weight"])
def test_a_tie_to_nothing(tmp_path: Path, write: Callable[..., Path], owner: str) -> None:
    def tie(model: dict[str, Any], rank: int) -> None:
        model["module"]["alias.weight"] = torch.zeros(0)
        model["shared_params"] = {"alias.weight": owner}

    with pytest.raises(CorruptError, match="tied") as caught:
        api.open(write(tmp_path / "run", GROUPS, 2, change_model=tie))
    assert (caught.value.fqn, caught.value.expected) == ("alias.weight", owner)


def test_equal_values_are_no_tie(tmp_path: Path) -> None:
    """Two parameters have equal content and address, but the checkpoint doesn't record a tie."""
    same = torch.arange(6.0)
    groups: Groups = [{"one": same, "two": same}]
    checkpoint = api.open(write_stage2(tmp_path / "run", groups, 2))
    assert checkpoint.ties == {}
    assert_holds(checkpoint, groups)


def test_buffers_that_each_rank_keeps_for_itself(tmp_path: Path) -> None:
    """BatchNorm's statistics differ by rank. Every command reads rank 0's, with a note."""

    def change(model: dict[str, Any], rank: int) -> None:
        model["module"]["bn.running_mean"] = torch.full((3,), float(rank))
        model["buffer_names"] = ["bn.running_mean"]

    run, key = write_stage3(tmp_path / "run", GROUPS, 2, change_model=change), ("bn.running_mean", BUFFER)
    checkpoint = api.open(run)
    assert any("every rank saved its own values of 1 buffer" in note for note in checkpoint.notes)
    for replica, value in ((None, 0.0), (0, 0.0), (1, 1.0)):
        assert content(api.open(run, replica=replica).tensors[key]) == raw(torch.full((3,), value))
    assert not any("every rank" in note for note in api.open(run, replica=1).notes)
    api.convert(run, "zero3", tmp_path / "one", world_size=1)
    assert api.verify(run, tmp_path / "one").equal
    assert check(run).whole
    module = torch.nn.Module()
    for group in GROUPS:
        for fqn, tensor in group.items():
            owner, _, name = fqn.rpartition(".")
            if owner and not hasattr(module, owner):
                module.add_module(owner, torch.nn.Module())
            module.get_submodule(owner).register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
    module.add_module("bn", torch.nn.Module())
    module.bn.register_buffer("running_mean", torch.full((3,), 7.0))
    with pytest.warns(UserWarning, match="every rank saved its own values"):
        assert load_into(module, run) == []
    assert module.bn.running_mean.tolist() == [0, 0, 0]


def test_a_model_file_of_another_step_than_the_optimizers(tmp_path: Path) -> None:
    """If only weights were loaded, the optimizer counts from 0: a note. If the folder's step agrees: an error."""

    def older(model: dict[str, Any], rank: int) -> None:
        model["global_steps"] = 5

    for write in (write_stage2, write_stage3):
        run = write(tmp_path / write.__name__, GROUPS, 2, change_model=older)
        with pytest.raises(CorruptError, match="different steps") as caught:
            api.open(run)
        assert (caught.value.expected or "").startswith("step 2, ") and caught.value.found == "step 5"
        (run / "global_step2").rename(run / "pytorch_model")
        (run / "latest").write_text("pytorch_model")
        checkpoint = api.open(run)
        assert any("the model is from step 5, but the optimizer has taken 2" in note for note in checkpoint.notes)


# -- errors ------------------------------------------------------------------------------------------------------------
def add_file(name: str) -> Callable[[Path], None]:
    return lambda folder: torch.save({}, folder / name)


def change_model(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / MODEL_NAME, change)


def nested(saved: dict[str, Any]) -> None:
    saved["module"] = {"language_model": {"encoder": saved["module"]}}


UNSUPPORTED = {
    "tensor-parallel": (add_file("mp_rank_01_model_states.pt"), "tensor parallel parts"),
    "tensor-parallel-zero3": (add_file("zero_pp_rank_0_mp_rank_01_model_states.pt"), "tensor parallel parts"),
    "tensor-parallel-optimizer": (add_file(OPTIMIZER_NAME.format(0).replace("_00", "_01")), "tensor parallel parts"),
    "moe-old": (add_file("expert_3_mp_rank_00_model_states.pt"), "experts"),
    "megatron": (change_model(nested), "Megatron-DeepSpeed"),
    "pipeline-module": (change_model(lambda saved: saved.update(module=None)), "pipeline"),
    "mp-world-size": (change_model(lambda saved: saved.update(mp_world_size=2)), "model parallel"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_layouts_that_are_not_supported_are_named(tmp_path: Path, case: str) -> None:
    damage, words = UNSUPPORTED[case]
    run = write_stage2(tmp_path / "run", GROUPS, 2)
    damage(run / "global_step2")
    for format in ("auto", "zero2"):
        with pytest.raises(NotFoundError, match=r"not supported|unsupported") as caught:
            api.open(run, format)
        assert words in caught.value.what


@pytest.mark.parametrize("name", ["layer_00-model_states.pt", "layer_01-model_00-model_states.pt"])
def test_a_pipeline_is_of_another_format(tmp_path: Path, name: str) -> None:
    run = write_stage2(tmp_path / "run", GROUPS, 2)
    add_file(name)(run / "global_step2")
    with pytest.raises(NotFoundError, match="DeepSpeed pipeline checkpoint") as caught:
        api.open(run, "zero2")
    assert "megatron-deepspeed" in str(caught.value.hint)
    with pytest.raises(CorruptError, match="do not form a model"):
        api.open(run)


def test_partitions_over_different_ranks_are_refused(tmp_path: Path) -> None:
    def moe(inner: dict[str, Any], rank: int) -> None:
        inner["partition_count"] = [2, 1]

    def autoep(inner: dict[str, Any], rank: int) -> None:
        inner["ds_zero_partition_groups"] = [{"sub_group": 0, "partition_count": 1}]

    with pytest.raises(NotFoundError, match="DeepSpeed-MoE"):
        api.open(write_stage2(tmp_path / "moe", GROUPS, 2, change=moe))
    with pytest.raises(NotFoundError, match="AutoEP"):
        api.open(write_stage3(tmp_path / "autoep", GROUPS, 2, change=autoep))


def test_a_rank_of_a_run_with_other_groups_says_so(tmp_path: Path) -> None:
    """Rank count and stage are equal, so the message must name the groups to show a difference."""

    def more_groups(inner: dict[str, Any], rank: int) -> None:
        inner["partition_count"] = [2] * (len(GROUPS) + rank)

    with pytest.raises(CorruptError, match="different runs") as caught:
        api.open(write_stage2(tmp_path / "run", GROUPS, 2, change=more_groups))
    assert caught.value.expected == f"ZeRO-2 on 2 ranks, with {len(GROUPS)} param groups"
    assert caught.value.found == f"ZeRO-2 on 2 ranks, with {len(GROUPS) + 1} param groups"


@pytest.mark.parametrize("entry", ["group_paddings", "param_alignment_paddings"])
@pytest.mark.parametrize("value", [-7, -1, 10**6, 2**70])
def test_paddings_that_cannot_be(tmp_path: Path, entry: str, value: int) -> None:
    def change(inner: dict[str, Any], rank: int) -> None:
        inner[entry][0] = value if entry == "group_paddings" else [value, 0, 0]

    with pytest.raises(CorruptError):
        api.plan(api.open(write_stage2(tmp_path / "run", GROUPS, 2, change=change)), "hf", Layout(dtype=FLOAT32))


def test_partitions_without_elements(tmp_path: Path) -> None:
    def change(inner: dict[str, Any], rank: int) -> None:
        inner["single_partition_of_fp32_groups"][0] = torch.zeros(0)
        inner["group_paddings"][0] = 0

    with pytest.raises(CorruptError, match="too short"):
        api.open(write_stage2(tmp_path / "run", GROUPS, 2, change=change))


ODD: list[Any] = [None, 7, "text", [], [None], {}, {"a": 1}, torch.zeros(2, 2), -1, 2**70]


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_odd_structure_ends_in_a_clear_error(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Replace each entry in both dicts by odd values. The reader succeeds or raises a CkptError."""
    run = write(tmp_path / "run", GROUPS, 2)
    folder = run / "global_step2"
    model = folder / (MODEL_NAME if write is write_stage2 else RANK_MODEL_NAME.format(0))
    outcomes = set()
    for path, inside in ((folder / OPTIMIZER_NAME.format(0), "optimizer_state_dict"), (model, None)):
        saved = torch.load(path, weights_only=True)
        entries = saved[inside] if inside else saved
        for key, original in list(entries.items()):
            for odd in ODD:
                entries[key] = odd
                torch.save(saved, path)
                outcomes.add(outcome(run))
            entries[key] = original
        torch.save(saved, path)
    assert outcomes == {"read", "CorruptError", "NotFoundError"}
    assert outcome(run) == "read"


def outcome(run: Path) -> str:
    try:
        checkpoint: Checkpoint = api.open(run)
    except (CorruptError, NotFoundError) as error:
        return type(error).__name__
    assert checkpoint.tensors
    return "read"


def test_a_structure_of_the_future_is_refused_with_its_version(tmp_path: Path) -> None:
    def future(inner: dict[str, Any], rank: int) -> None:
        inner["ds_version"] = "9.0"
        inner["single_partition_of_fp32_groups"] = 7

    run = write_stage2(tmp_path / "run", GROUPS, 2, change=future)
    for path in (run / "global_step2").glob("*optim_states.pt"):
        torch.save(torch.load(path) | {"ds_version": "9.0"}, path)
    with pytest.raises(CorruptError, match="no known version") as caught:
        api.open(run)
    assert "deepspeed 9.0" in str(caught.value.found)


@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [
        ("trl-lora-zero3/outputs/qwen3-lora/checkpoint-2", True),
        ("lora-zero3", False),
        ("trl-zero2/outputs/llama-sft/checkpoint-2", False),
    ],
)
def test_frozen_parameters_that_were_not_saved_are_told_of(
    fixtures: Path, tmp_path: Path, name: str, is_left_out: bool
) -> None:
    """DeepSpeed records this. Without a config, no missing name is known and the output looks complete."""
    done = commands.ckpt("convert", "auto", "zero3", fixtures / name, "-o", tmp_path / "out", "--world-size", "1")
    assert done.code == 0
    assert ("saved without its frozen parameters" in done.err) == is_left_out
    again = api.open(tmp_path / "out")
    assert any("saved without its frozen parameters" in note for note in again.notes) == is_left_out
    assert again.state.frozen_saved == (not is_left_out)


def test_a_plain_read_imports_neither_neox_nor_pipelines_nor_megatron(fixtures: Path) -> None:
    code = (
        "import re, sys; from pathlib import Path; from ckpt.plan.checkpoint import ReadRequest\n"
        "from converters.deepspeed.stage0 import ZERO0; from converters.deepspeed.zero import ZERO1\n"
        "for path in sys.argv[2:]: ZERO1.read(Path(path), ReadRequest())\n"
        "ZERO0.read(Path(sys.argv[1]), ReadRequest())\n"
        "print([name for name in sys.modules if re.search('neox|pipeline|megatron', name)])\n"
    )
    names = ("toy-zero0", *TOYS, "experts-zero1", "autoep-zero3", "autotp-zero1")
    steps = [str(fixtures / name / "global_step2") for name in names]
    done = subprocess.run([sys.executable, "-c", code, *steps], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("run", ["toy-zero1", "toy-zero2"])
@pytest.mark.parametrize(("states", "masters", "code"), [(0, 0, 0), (3, 0, 4), (2, 0, 4), (0, 3, 0)])
def test_the_last_rank_has_the_padding_of_its_states(
    run: str, states: int, masters: int, code: int, fixtures: Path, tmp_path: Path
) -> None:
    """DeepSpeed 0.19.8 pads masters when it loads them. Shorter states load, and the next step fails."""
    shutil.copytree(fixtures / run, tmp_path / "run")
    (path,) = (tmp_path / "run").rglob("*_rank_2_*optim_states.pt")
    with rewriting(path) as saved:
        inner = saved["optimizer_state_dict"]
        own = inner["base_optimizer_state"]["state"][0]
        own["exp_avg"] = own["exp_avg"][: len(own["exp_avg"]) - states].clone()
        kept = inner["single_partition_of_fp32_groups"]
        kept[0] = torch.cat([kept[0], torch.zeros(masters)])
    checked = ckpt("check", tmp_path / "run")
    assert checked.code == code, checked.out
    assert ("exp_avg does not match the rank part's size" in checked.out) == bool(code), checked.out


# -- records that contradict each other --------------------------------------------------------------------------------
def _reversed(model: dict[str, Any]) -> None:
    model["param_shapes"] = [OrderedDict(reversed(group.items())) for group in model["param_shapes"]]


def _smaller(model: dict[str, Any]) -> None:
    model["param_shapes"][0]["embed.weight"] = torch.Size([259, 6])


@pytest.mark.parametrize("change", [_reversed, _smaller])
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_lie_where_each_rank_recorded_them(
    stage: int, change: Callable[[dict[str, Any]], None], fixtures: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(fixtures / f"toy-zero{stage}", tmp_path / "run"))
    edit(run / "global_step2" / MODEL_NAME, change)
    with pytest.raises(CorruptError, match="contradicts the rank's own record") as caught:
        api.open(run)
    assert "param_slice_mappings" in str(caught.value.expected)


def test_ranks_that_record_other_frozen_parameters_are_of_another_model(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero3", tmp_path / "run"))

    def other(model: dict[str, Any]) -> None:
        model["frozen_param_shapes"]["frozen.weight"] = torch.Size([5, 7])

    edit(run / "global_step2" / RANK_MODEL_NAME.format(1), other)
    with pytest.raises(CorruptError, match="ranks describe different models"):
        api.open(run)
