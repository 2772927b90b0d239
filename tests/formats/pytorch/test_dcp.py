"""`converters/pytorch/dcp.py`, `keys.py`, `ckpt/containers/dcp/write.py`: DCP from several torch versions.

DCP is read bit for bit, loaded by torch when written, and refused when broken. Slow tests train with FSDP1, FSDP2, HSDP
and TP.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.errors import CkptError, CorruptError, LossError, NotFoundError, UnsafeError, UsageError
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, Layout
from ckpt.plan.planner import check_source
from ckpt.plan.tensors import Box, Tensor
from ckpt.state.positions import with_step_count
from converters.pytorch.dcp import DCP
from tests.support.commands import ckpt as command
from tests.support.dcp_folders import check_replicas, edit, nested, read, save, trained, write
from tests.support.engines import Truth, fork_once, launch, launch_in_turn, modeling, raw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = ("dcp-fsdp2", "dcp-enums-fsdp2", "dcp-torch21-fsdp1", "dcp-torch23-fsdp1")


def stored(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Check that the fragments tile the tensor, and assemble it in plain numpy."""
    check_source(tensor)
    item = np.dtype(f"V{tensor.dtype.itemsize}")
    whole = np.zeros(tensor.shape, item)
    for fragment in tensor.fragments():
        extent = fragment.extent
        assert isinstance(fragment.region, Box)
        data = Path(extent.path).read_bytes()[extent.offset : extent.end]
        strides = [stride * item.itemsize for stride in extent.strides]
        window = tuple(slice(a, a + n) for a, n in zip(fragment.region.offsets, fragment.region.sizes, strict=True))
        whole[window] = np.ndarray(extent.shape, item, data, 0, strides)
    return str(tensor.dtype), tensor.shape, whole.tobytes()


def assert_true(checkpoint: Checkpoint, truth: Mapping[tuple[str, str], Any]) -> None:
    """Check that the checkpoint has every tensor of the truth, bit for bit. FSDP's weights are its masters."""
    for (fqn, role), expected in truth.items():
        tensor = checkpoint.get(fqn, role) or checkpoint.get(checkpoint.ties.get(fqn, fqn), WEIGHT)
        assert tensor is not None, (fqn, role)
        assert stored(tensor) == expected, (fqn, role)


def loaded(folder: Path) -> dict[str, Any]:
    """Return the nested state dict from torch's own DCP converter."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = folder.parent / f"{folder.name}.loaded.pt"
    dcp_to_torch_save(folder, file)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state


def same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and raw(a) == raw(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


# -- committed checkpoints ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FIXTURES)
def test_committed_checkpoints_are_read_bit_for_bit(fixtures: Path, name: str) -> None:
    checkpoint = read(fixtures / name)
    truth = Truth.load(fixtures / name / "truth" / "step-2.safetensors").tensors
    assert_true(checkpoint, truth)
    assert checkpoint.tensors.keys() == truth.keys()
    assert len(truth) == 8
    assert checkpoint.world_size == 2
    state = checkpoint.state
    assert state.step == 2
    assert state.scalars["step"] == {"gain": 2.0, "down.weight": 2.0}
    assert sorted(fqn for group in state.param_groups for fqn in group.fqns) == ["down.weight", "gain"]
    assert all(group.options["betas"] == (0.9, 0.999) for group in state.param_groups)
    assert state.lr_scheduler["last_epoch"] == 2


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("num_ranks", [1, 3, 7])
def test_what_is_written_is_what_torch_loads(fixtures: Path, tmp_path: Path, name: str, num_ranks: int) -> None:
    shutil.copytree(fixtures / name / "step-2", tmp_path / "source")
    written = write(read(tmp_path / "source"), tmp_path / "written", num_ranks)
    assert len(list(written.glob("__*_0.distcp"))) == num_ranks
    assert same(loaded(written), loaded(tmp_path / "source"))
    again = read(written)
    assert again.world_size == num_ranks
    assert again.state.entries() == read(tmp_path / "source").state.entries()


def test_the_same_source_gives_the_same_bytes(fixtures: Path, tmp_path: Path) -> None:
    checkpoint = read(fixtures / "dcp-fsdp2" / "step-2")
    a, b = (write(checkpoint, tmp_path / name, 2) for name in "ab")
    assert {p.name: p.read_bytes() for p in a.iterdir()} == {p.name: p.read_bytes() for p in b.iterdir()}


# -- spellings, in this process ----------------------------------------------------------------------------------------
def expected(model: Any, optimizer: Any) -> dict[tuple[str, str], Any]:
    truth = {(fqn, WEIGHT): raw(tensor) for fqn, tensor in model.state_dict().items()}
    for fqn, parameter in model.named_parameters():
        truth |= {(fqn, k): raw(v) for k, v in optimizer.state[parameter].items() if k != "step"}
    return truth


SPELLINGS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "nested": lambda m, o: dict(zip(("model", "optimizer"), nested(m, o), strict=True)),
    "flat": lambda m, o: dict(zip(("model", "optimizer"), nested(m, o, True), strict=True)),
    "a stateful": lambda m, o: {"app": dict(zip(("model", "optim"), nested(m, o), strict=True))},
    "torchtitan": lambda m, o: {**nested(m, o)[0], "optimizer": nested(m, o, True)[1], "train_state": {"step": 1}},
    "another name": lambda m, o: dict(zip(("net", "optimizer"), nested(m, o), strict=True)),
    "wrapped": lambda m, o: {
        "model": {f"module._orig_mod.{k.replace('.', '._fsdp_wrapped_module.')}": v for k, v in m.state_dict().items()},
        "optimizer": nested(m, o)[1],
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same(tmp_path: Path, spelling: str) -> None:
    model, optimizer = trained()
    checkpoint = read(save(SPELLINGS[spelling](model, optimizer), tmp_path / "step"))
    truth = expected(model, optimizer)
    assert_true(checkpoint, truth)
    assert checkpoint.tensors.keys() == truth.keys()
    (group,) = checkpoint.state.param_groups
    assert group.fqns == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert group.options["lr"] == 1e-3
    assert checkpoint.state.scalars == {"step": dict.fromkeys(group.fqns, 1.0)}


@pytest.mark.parametrize("is_last", [False, True])
def test_an_average_that_is_called_model_too_is_not_taken_for_the_model(tmp_path: Path, *, is_last: bool) -> None:
    """In `{"ema": {"model": ...}, "model": ..., "optimizer": ...}`, the model next to the optimizer always wins."""
    model, optimizer = trained()
    states = dict(zip(("model", "optimizer"), nested(model, optimizer), strict=True))
    average = {"ema": {"model": {name: value + 1 for name, value in states["model"].items()}}}
    for number, own in enumerate((states, {"app": states})):
        state = own | average if is_last else average | own
        checkpoint = read(save(state, tmp_path / str(number)))
        assert_true(checkpoint, expected(model, optimizer))
        assert any("'ema.model' is another model" in note for note in checkpoint.notes)
        kept = checkpoint.state.entries()["ema"]["model"]
        assert kept.keys() == states["model"].keys()
    beside = read(save({"app": states, "module": average["ema"]["model"]}, tmp_path / "beside"))
    assert_true(beside, expected(model, optimizer))
    with pytest.raises(LossError, match="uses the name of the model") as caught:  # another reader would find two models
        write(beside, tmp_path / "out")
    assert caught.value.found == "module"


def test_content_that_is_not_supported_is_no_other_ranks_file(tmp_path: Path) -> None:
    import torch

    held = frozenset([torch.eye(3).to_sparse()])
    with pytest.raises(UnsafeError, match="a sparse tensor") as refused:
        read(save({"model": {"w": torch.ones(4)}, "extra": held}, tmp_path / "step"))
    assert refused.value.fqn == "extra" and refused.value.hint is None


def test_one_of_two_models_is_not_guessed(tmp_path: Path) -> None:
    import torch

    model, optimizer = trained()
    states = dict(zip(("model", "optimizer"), nested(model, optimizer), strict=True))
    weights = {"model": states["model"]}
    for number, held in enumerate((states, weights)):
        with pytest.raises(LossError, match="several models") as caught:
            read(save({"actor": held, "critic": held}, tmp_path / str(number)))
        assert caught.value.found == "actor.model, critic.model"
    with pytest.raises(LossError, match="several models"):
        read(save({**states, "critic": states}, tmp_path / "critic"))
    two = {"generator": states["model"], "discriminator": states["model"], "optimizer": states["optimizer"]}
    with pytest.raises(LossError, match="several models") as caught:
        read(save(two, tmp_path / "two"))
    assert caught.value.found == "discriminator, generator"
    for number, held in enumerate(
        (
            {"critic": weights, "actor": states},
            {"rng": {"cpu": torch.ones(3)}, "net": states["model"], "optimizer": states["optimizer"]},
        )
    ):
        checkpoint = read(save(held, tmp_path / f"one-{number}"))
        assert_true(checkpoint, expected(model, optimizer))


@pytest.mark.parametrize("average", ["ema.model", "model"])
def test_an_average_that_is_spread_over_ranks_is_said_to_be_left(fixtures: Path, tmp_path: Path, average: str) -> None:
    """The fixture's metadata lists each model tensor a second time under another name."""
    step = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "step-2"))
    own = "model" if average != "model" else "app.model"

    def change(metadata: Any) -> None:
        def names(fqn: str) -> list[str]:
            section, _, rest = fqn.partition(".")
            moved = fqn if own == "model" or section not in ("model", "optimizer") else f"app.{fqn}"
            return [moved, f"{average}.{rest}"] if section == "model" else [moved]

        for fqn, kind in list(metadata.state_dict_metadata.items()):
            del metadata.state_dict_metadata[fqn]
            path = metadata.planner_data.pop(fqn)
            for name in names(fqn):
                metadata.state_dict_metadata[name] = kind
                before = tuple(name.removesuffix(fqn.partition(".")[2]).strip(".").split("."))
                metadata.planner_data[name] = (*before, *path[1:])
        for index, info in list(metadata.storage_data.items()):
            del metadata.storage_data[index]
            metadata.storage_data |= {replace(index, fqn=name): info for name in names(index.fqn)}

    truth = read(step)
    edit(step, change)
    checkpoint = read(step)
    assert checkpoint.tensors.keys() == truth.tensors.keys()
    assert f"the model is {own!r}: {average!r} is another model, kept as training state" in checkpoint.notes
    assert any("spread over ranks and not carried" in note and f"{average}." in note for note in checkpoint.notes)


def test_a_model_at_the_top_is_not_left_for_an_average_in_a_dict(tmp_path: Path) -> None:
    """In `{**model, "optimizer": ..., "ema": {"model": ...}}`, only the optimizer identifies the model."""
    model, optimizer = trained()
    weights, states = nested(model, optimizer)
    average = {"ema": {"model": {name: value + 1 for name, value in weights.items()}}}
    checkpoint = read(save({**weights, "optimizer": states, **average}, tmp_path / "with"))
    assert_true(checkpoint, expected(model, optimizer))
    assert any("'ema.model' is another model" in note for note in checkpoint.notes)
    with pytest.raises(LossError, match="several models") as caught:
        read(save({**weights, **average}, tmp_path / "without"))
    assert caught.value.found == "the tensors at the top, ema.model"


def test_of_models_without_a_name_wrappers_and_sgd_hide_none(tmp_path: Path) -> None:
    """DDP's prefix must not select the average, and SGD without states has names only in its groups."""
    import torch

    model, optimizer = trained()
    weights, states = nested(model, optimizer)
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    average = {name: value + 1 for name, value in weights.items()}
    for number, held in enumerate(({"optimizer": states}, {})):  # nothing shows which model was trained
        with pytest.raises(LossError, match="several models") as caught:
            read(save({"net": wrapped, "average": average, **held}, tmp_path / f"two-{number}"))
        assert caught.value.found == "average, net"
    for flat in (False, True):
        weights, states = nested(model, torch.optim.SGD(model.parameters(), lr=0.1), flat=flat)
        step = {"net": weights, "rng": {"cpu": torch.ones(3)}, "optimizer": states}
        assert {fqn for fqn, _ in read(save(step, tmp_path / f"sgd-{flat}")).tensors} == weights.keys()


@pytest.mark.parametrize("target", ["zero2", "universal"])
def test_a_step_that_only_the_optimizer_has_counted(tmp_path: Path, target: str) -> None:
    """With only `{"model": ..., "optimizer": ...}`, the run resumes at Adam's step, not at 0."""
    model, optimizer = trained()
    names = ("model", "optimizer")
    source = save(dict(zip(names, nested(model, optimizer), strict=True)), tmp_path / "step")
    done = ckpt.convert(source, target, tmp_path / "out", **({"world_size": 2} if target == "zero2" else {}))
    assert any("no step is recorded: using 1, " in note for note in done.to_json()["notes"])
    assert ckpt.open(tmp_path / "out").state.step == 1 and ckpt.check(tmp_path / "out").whole
    next(iter(optimizer.state.values()))["step"] += 1
    uneven = read(save(dict(zip(names, nested(model, optimizer), strict=True)), tmp_path / "uneven"))
    assert with_step_count(uneven) == (uneven, ("no step is recorded, and the optimizer's counts differ: 1 to 2",))


def test_a_root_without_prefix_keeps_names_that_begin_with_model(tmp_path: Path) -> None:
    import torch

    state = {"model.embed.weight": torch.ones(2, 3), "lm_head.weight": torch.zeros(3)}
    assert {fqn for fqn, _ in read(save(state, tmp_path / "step")).tensors} == state.keys()


def test_states_by_number_are_named_where_names_are_recorded_and_else_left(tmp_path: Path) -> None:
    import torch

    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = read(save(state, tmp_path / "numbers"))
    assert {role for _, role in checkpoint.tensors} == {WEIGHT}
    assert any("they are numbered, without parameter names" in note for note in checkpoint.notes)

    named = torch.optim.AdamW(list(model.named_parameters()), lr=1e-3)
    named.step()
    state["optimizer"] = named.state_dict()
    assert_true(read(save(state, tmp_path / "names")), expected(model, named))

    state["optimizer"]["state"][99] = state["optimizer"]["state"].pop(0)
    with pytest.raises(CorruptError, match="in no param group") as caught:
        read(save(state, tmp_path / "stranger"))
    assert caught.value.fqn == "99"


def test_dtypes_shapes_and_strides_survive(tmp_path: Path) -> None:
    import torch

    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int": torch.tensor(-5),
        "nan": torch.tensor([0x7FC00001, -(1 << 31)], dtype=torch.int32).view(torch.float32),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "view": torch.arange(12).reshape(3, 4)[:, 1:3],
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "uint16": torch.arange(5).to(torch.uint16),
    }
    checkpoint = read(save({"model": tensors}, tmp_path / "step"))
    assert_true(checkpoint, {(fqn, WEIGHT): raw(tensor) for fqn, tensor in tensors.items()})
    assert same(loaded(write(checkpoint, tmp_path / "written", 3)), {"model": tensors})


def test_training_state_goes_round(tmp_path: Path) -> None:
    import torch

    model, optimizer = trained()
    state = SPELLINGS["nested"](model, optimizer) | {
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1, 0.2], "nested": {"tuple": (1, None), "list": [[1], [2]]}},
        "dataloader": {"dp_rank_0": b"\x80\x04N.", "world_size": 1},
        "rng_state": {"0": torch.get_rng_state()},
        "seed": torch.tensor(7),
    }
    checkpoint = read(save(state, tmp_path / "step"))
    assert checkpoint.state.private["torch"]["dataloader"] == {"dp_rank_0": b"\x80\x04N.", "world_size": 1}
    assert same(loaded(write(checkpoint, tmp_path / "written", 2)), loaded(tmp_path / "step"))


def test_accelerates_two_folders_are_one_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights, states = nested(model, optimizer)
    step = tmp_path / "checkpoint-7"
    save({"model": weights}, step / "pytorch_model_fsdp_0")
    save({"optimizer": states}, step / "optimizer_0")
    checkpoint = read(step)
    assert_true(checkpoint, expected(model, optimizer))
    assert_true(read(step / "pytorch_model_fsdp_0"), expected(model, optimizer))

    (step / "trainer_state.json").write_text('{"global_step": 7}')
    (step / "config.json").write_text("{}")
    assert read(step).state.step == read(step / "optimizer_0").state.step == 7
    written = write(checkpoint, tmp_path / "written", 3)
    names = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert {"trainer_state.json", "config.json", "optimizer_0/.metadata", "pytorch_model_fsdp_0/__2_0.distcp"} <= names
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert same(loaded(written / folder), loaded(step / folder))


def test_run_folders_of_torchtitan(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (5, 10):
        save(SPELLINGS["torchtitan"](model, optimizer), tmp_path / "checkpoint" / f"step-{step}")
    assert read(tmp_path).path.endswith("step-10")
    assert read(tmp_path, "step-5").path.endswith("step-5")
    (tmp_path / "checkpoint" / "step-10" / ".metadata").unlink()
    older = read(tmp_path)
    assert older.path.endswith("step-5")
    assert [note.partition(",")[0] for note in older.passed_over] == ["checkpoint/step-10 is skipped"]


def test_other_formats_folders_are_not_taken(tmp_path: Path) -> None:
    save(SPELLINGS["nested"](*trained()), tmp_path / "megatron")
    (tmp_path / "megatron" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert DCP.find(tmp_path / "megatron", None) is None
    assert DCP.find(tmp_path, None) is None


def test_safetensors_of_dcp(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weight = torch.arange(15.0).reshape(5, 3)
    for rank, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 5))):
        pieces = {"weight": weight[rows].contiguous()} | ({"scale": torch.tensor(2.0)} if rank == 1 else {})
        info = {name: {"saved_offsets": [rows.start, 0] if name == "weight" else []} for name in pieces}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        save_file(pieces, tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata)
    checkpoint = read(tmp_path)
    assert_true(checkpoint, {("weight", WEIGHT): raw(weight), ("scale", WEIGHT): raw(torch.tensor(2.0))})
    assert checkpoint.world_size == 3
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptError, match="stored nowhere"):
        check_source(read(tmp_path).tensors["weight", WEIGHT])


def test_safetensors_that_torch_writes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    model = trained()[0]
    writer = HuggingFaceStorageWriter(str(tmp_path / "step"), save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    assert_true(read(tmp_path / "step"), {(fqn, WEIGHT): raw(t) for fqn, t in model.state_dict().items()})


def test_optimizer_states_prove_that_no_rank_of_safetensors_is_missing(fixtures: Path, tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("truth")
    run = Path(shutil.copytree(fixtures / "transformers-distributed" / "sharded", tmp_path / "run", ignore=skipped))
    assert not any("would go unnoticed" in note for note in ckpt.open(run).notes)
    last = max(run.glob("shard-*"))
    content = last.read_bytes()
    last.unlink()
    assert command("check", run).code == 4
    last.write_bytes(content)
    shutil.rmtree(run / "optimizer")
    assert any("would go unnoticed" in note for note in ckpt.open(run).notes)


@pytest.mark.parametrize("num_files", [None, 1, 2])
def test_whole_tensors_of_torchs_safetensors_writer_are_a_model_folder(tmp_path: Path, num_files: int | None) -> None:
    """The files record where pieces begin, and all begin at zero."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    weights = {f"layers.{number}.weight": torch.randn(4, 4) for number in range(3)}
    places = {fqn: 1 + number % num_files for number, fqn in enumerate(weights)} if num_files else None
    writer = HuggingFaceStorageWriter(str(tmp_path / "model"), fqn_to_index_mapping=places)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    checkpoint = ckpt.open(tmp_path / "model")
    assert checkpoint.format == "hf" and len(list((tmp_path / "model").glob("*.safetensors"))) == (num_files or 1)
    assert_true(checkpoint, {(fqn, WEIGHT): raw(tensor) for fqn, tensor in weights.items()})
    piece = next((tmp_path / "model").glob("*.safetensors"))
    content = piece.read_bytes()
    piece.write_bytes(content.replace(b"[0, 0]", b"[4, 0]", 1))
    with pytest.raises(NotFoundError, match="pieces of tensors"):
        ckpt.open(tmp_path / "model")


def test_the_file_system_writers_safetensors(tmp_path: Path) -> None:
    """Values precede the tensors. A piece at another place than the metadata says is refused."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    model, optimizer = trained()
    weights, states = nested(model, optimizer)
    folder = tmp_path / "step-1"
    writer = dcp.FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": weights, "optimizer": states, "step": 1}, storage_writer=writer, no_dist=True)
    checkpoint = read(folder)
    assert checkpoint.state.step == 1
    assert_true(checkpoint, expected(model, optimizer))
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    for old, new in ((b'"model.0.weight"', b'"model.0.waight"'), (b"[0, 0]", b"[1, 0]"), (b'"F32"', b'"I32"')):
        assert old in content
        data.write_bytes(content.replace(old, new))
        with pytest.raises(CkptError) as caught:
            read(folder)
        assert caught.value.exit_code == 4, new


@pytest.mark.parametrize("nested", [False, True])
def test_tensors_of_one_size_in_a_file_of_safetensors_are_no_ties(tmp_path: Path, nested: bool) -> None:
    """For all of them, torch records one place and length, so they look like a single tensor stored once."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    torch.manual_seed(0)
    weights = {f"layers.{number}.weight": torch.randn(4, 4) for number in range(3)}
    weights |= {"head.weight": torch.randn(2, 4), "none": torch.empty(0), "nothing": torch.empty(0)}
    writer = dcp.FileSystemWriter(tmp_path / "step-1", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": weights} if nested else weights, storage_writer=writer, no_dist=True)
    checkpoint = read(tmp_path / "step-1")
    assert checkpoint.ties == {}
    assert_true(checkpoint, {(fqn, WEIGHT): raw(tensor) for fqn, tensor in weights.items()})
    counted = ckpt.check(tmp_path / "step-1", every_byte=True).bytes
    files = [path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")]
    assert counted is not None and counted.compared == 0
    assert sum(files) <= counted.without <= sum(files) + (tmp_path / "step-1/.metadata").stat().st_size


def test_tied_parameters_are_those_that_the_config_declares(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    model.config.architectures = ["Qwen2ForCausalLM"]
    state = {"model": model.state_dict()}
    folder = save(state, tmp_path / "step")
    assert read(folder).ties == {}
    model.config.save_pretrained(folder)
    checkpoint = read(folder)
    assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    check_replicas(checkpoint.tensors["model.embed_tokens.weight", WEIGHT])
    written = write(checkpoint, tmp_path / "written", 2)
    assert same(loaded(written), state)
    (written / "config.json").unlink()
    again = read(written)  # stores the tensor once, under both names
    assert (again.ties, again.tensors.keys()) == (checkpoint.ties, checkpoint.tensors.keys())

    state["model"]["lm_head.weight"] = torch.zeros_like(state["model"]["lm_head.weight"])
    save(state, folder)
    with pytest.raises(CorruptError, match="copies disagree") as caught:
        check_replicas(read(folder).tensors["model.embed_tokens.weight", WEIGHT])
    assert caught.value.rank is None and "tie_word_embeddings false" in str(caught.value.hint)
    with pytest.raises(UsageError, match="chooses nothing"):  # it would drop the output layer
        ckpt.open(folder, replica=0)


# -- real engines ------------------------------------------------------------------------------------------------------
#: (strategy, model, keys) by name, on 4 ranks.
RUNS = {
    "fsdp2": ("fsdp2", "toy", "nested"),
    "fsdp1": ("fsdp1", "toy", "nested"),
    "hsdp": ("hsdp", "llama", "flat"),
    "tp-fsdp": ("tp-fsdp", "llama_even", "nested"),
    "flat": ("fsdp2", "qwen2", "flat"),
}
#: (run, engine, ranks of the output), each loaded on 3 ranks.
LOADS = [("fsdp2", "fsdp1", 3), ("fsdp1", "fsdp2", 2), ("flat", "fsdp2", 3), ("hsdp", "fsdp1", 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    common = {"save": "dcp", "truth": True, "steps": 2, "length": 8}
    jobs = [
        {"strategy": strategy, "model": model, "keys": keys, "output": str(folder / name), **common}
        for name, (strategy, model, keys) in RUNS.items()
    ]
    zero = {"strategy": "zero3", "model": "qwen2", "output": str(folder / "zero3"), "truth": True, "steps": 2}
    launch_in_turn([(4, jobs), (3, [zero | {"length": 8}])], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_real_runs_are_read_bit_for_bit(runs: Path, name: str) -> None:
    truth = Truth.load(runs / name / "truth" / "step-2.safetensors")
    checkpoint = read(runs / name)
    assert_true(checkpoint, truth.tensors)
    assert checkpoint.world_size == 4
    assert checkpoint.state.step == 2
    groups = {frozenset(group.fqns): group.options for group in checkpoint.state.param_groups}
    if RUNS[name][2] == "nested":  # flattening merges groups with equal options and may repeat tied names
        assert {frozenset(group["names"]): group["lr"] for group in truth.metadata["param_groups"]} == {
            fqns: options["lr"] for fqns, options in groups.items()
        }
    again = loaded(Path(checkpoint.path))
    model = again.get("model", again)
    for (fqn, role), tensor in checkpoint.tensors.items():
        if role == WEIGHT:
            assert stored(tensor) == raw(model[fqn]), fqn


def test_a_flattened_optimizer_is_what_torch_loads_flattened(tmp_path: Path) -> None:
    """With `flatten_optimizer_state_dict=True`, torch expects param group options under each parameter."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    from ckpt import api

    model, optimizer = trained()
    whole, states = nested(model, optimizer)
    source = api.open(save({"model": whole, "optimizer": states}, tmp_path / "nested"))
    api.plan(source, "dcp", Layout(flat_optimizer=True)).run(tmp_path / "flat")
    assert api.verify(source, api.open(tmp_path / "flat")).equal

    other, empty = trained()
    for tensor in (*other.parameters(), *(state["exp_avg"] for state in empty.state.values())):
        tensor.data.zero_()
    empty.param_groups[0]["lr"] = 7.0
    weights, flat = nested(other, empty, flat=True)
    state = {"model": weights, "optimizer": flat}
    dcp.load(state, checkpoint_id=tmp_path / "flat", no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(other, empty, model_state_dict=weights, optim_state_dict=state["optimizer"], options=options)
    assert empty.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for one, copy in zip(model.parameters(), other.parameters(), strict=True):
        assert raw(one) == raw(copy) and raw(optimizer.state[one]["exp_avg"]) == raw(empty.state[copy]["exp_avg"])

    with pytest.raises(UsageError, match="holds no optimizer"):
        api.plan(source, "hf", Layout(flat_optimizer=True))


@pytest.mark.slow
def test_transformers_loads_a_flattened_optimizer(fixtures: Path, tmp_path: Path) -> None:
    """`load_optimizer_distributed` takes a ZeRO-3 run's states on other ranks, in this form alone."""
    from safetensors.torch import load_file

    run, truth = fixtures / "trl-zero3" / "outputs", fixtures / "trl-zero3" / "truth" / "checkpoint-2.safetensors"
    ckpt.convert(run, "hf", tmp_path / "model", dtype="fp32")
    places = [tmp_path / name / "optimizer_0" for name in ("flat", "nested", "changed")]
    for place in places:
        ckpt.convert(run, "dcp", place.parent, world_size=3, flat_optimizer=place != places[1])
    first = next(iter(read(places[2].parent).tensors["lm_head.weight", "exp_avg"].fragments())).extent
    content = bytearray(Path(first.path).read_bytes())
    content[first.offset] ^= 1
    Path(first.path).write_bytes(content)
    arguments = [str(path) for path in (tmp_path, tmp_path / "model", *places)]
    fork_once(tmp_path, [(2, "tests.support.transformers_loading", arguments)], ["transformers", modeling("qwen3")])
    lrs, refused, _ = (tmp_path / "said.txt").read_text().splitlines()
    assert set(json.loads(lrs)) == {group["lr"] for group in Truth.load(truth).metadata["param_groups"]}
    assert "Missing key in checkpoint state_dict: optimizer.param_groups." in refused
    expected = {name: value for name, value in load_file(truth).items() if not name.startswith("weight/")}
    for number, differing in ((0, set()), (2, {"exp_avg/lm_head.weight"})):
        live = load_file(tmp_path / f"{number}.safetensors")
        found = {name: live[name.replace("master/", "weight/")] for name in expected}
        assert {name for name, value in expected.items() if raw(found[name]) != raw(value)} == differing


@pytest.mark.slow
def test_engines_load_what_is_written(runs: Path, tmp_path: Path) -> None:
    """Other engines load on other numbers of ranks, in the source's form of the optimizer's keys.

    FSDP2 also loads a ZeRO-3 run's masters, states and steps.
    """
    from ckpt import api

    jobs, truths = [], []
    for name, engine, num_ranks in LOADS:
        written = write(read(runs / name), tmp_path / f"{name}-{num_ranks}", num_ranks)
        output = tmp_path / f"{name}-in-{engine}"
        _, model, keys = RUNS[name]
        jobs.append({"strategy": engine, "model": model, "keys": keys, "resume": str(written), "output": str(output)})
        truths.append((runs / name / "truth" / "step-2.safetensors", output))
    written = write(api.open(runs / "zero3"), tmp_path / "zero3", 2)
    jobs.append({"strategy": "fsdp2", "model": "qwen2", "resume": str(written), "output": str(tmp_path / "from-zero3")})
    truths.append((runs / "zero3" / "truth" / "global_step2.safetensors", tmp_path / "from-zero3"))
    launch(jobs, 3, tmp_path, "tests.support.dcp_loading")
    for path, output in truths:
        before, after = Truth.load(path), Truth.load(output / "truth.safetensors")
        masters = {fqn for fqn, role in before.tensors if role == "master"}
        for (fqn, role), tensor in before.tensors.items():
            if role == WEIGHT and fqn in masters:
                continue  # the rounded weight: FSDP keeps the master
            assert after.tensors[fqn, WEIGHT if role == "master" else role] == tensor, (output.name, fqn, role)
        assert after.metadata["adam_step"] == 2
        assert after.metadata["param_groups"] == before.metadata["param_groups"]
