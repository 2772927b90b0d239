"""`ckpt/containers/dcp/metadata.py`, `items.py`, `tensors.py`, `tiling.py`: refuse broken or hostile metadata."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError, CorruptError, NotFoundError, UnsafeError
from ckpt.plan.checkpoint import WEIGHT, Layout
from ckpt.plan.planner import make_plan
from converters.pytorch.dcp import DCP
from tests.support.dcp_folders import check_replicas, edit, nested, read, save, trained, write


@pytest.fixture
def step(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "step"))


def refused(step: Path) -> CkptError:
    """Return the error raised on reading or before the first byte is written."""
    with pytest.raises(CkptError) as error:
        checkpoint = read(step)
        make_plan(checkpoint, DCP.lay_out(checkpoint, Layout()))
    return error.value


def test_a_missing_data_file(step: Path) -> None:
    (step / "__1_0.distcp").unlink()
    error = refused(step)
    assert (error.exit_code, Path(error.path or "").name) == (4, "__1_0.distcp")
    assert error.fqn


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_a_truncated_data_file(step: Path, length: int) -> None:
    os.truncate(step / "__0_0.distcp", length)
    error = refused(step)
    assert (error.exit_code, Path(error.path or "").name) == (4, "__0_0.distcp")
    assert "for [0:" in str(error)


def test_a_data_file_of_zeros(step: Path) -> None:
    size = (step / "__0_0.distcp").stat().st_size
    (step / "__0_0.distcp").write_bytes(bytes(size))
    assert refused(step).exit_code == 4


def test_missing_and_empty_metadata(step: Path) -> None:
    (step / ".metadata").write_bytes(b"")
    assert refused(step).exit_code == 4
    (step / ".metadata").unlink()
    error = refused(step)
    assert error.exit_code == 4
    assert "not finished" in str(error)


def test_a_hole(step: Path) -> None:
    edit(step, lambda m: m.state_dict_metadata["model.down.weight"].chunks.pop())
    error = refused(step)
    assert (error.exit_code, error.fqn) == (4, "down.weight")
    assert "hole at elements 9:15" in str(error)
    assert Path(error.path or "").suffix == ".distcp"


def test_an_overlap(step: Path) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def shift(metadata: Any) -> None:
        key = "model.down.weight"
        second = metadata.state_dict_metadata[key].chunks[1]
        metadata.storage_data[MetadataIndex(key, (2, 0))] = metadata.storage_data[MetadataIndex(key, second.offsets)]
        metadata.state_dict_metadata[key].chunks[1] = ChunkStorageMetadata((2, 0), second.sizes)

    edit(step, shift)
    error = refused(step)
    assert error.exit_code == 4
    assert "overlap" in str(error)


def test_a_chunk_outside_its_tensor(step: Path) -> None:
    import torch

    def shrink(metadata: Any) -> None:
        metadata.state_dict_metadata["model.down.weight"].size = torch.Size([4, 3])

    edit(step, shrink)
    assert "outside" in str(refused(step))


def test_an_item_that_is_another_tensor(step: Path) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    def swap(metadata: Any) -> None:
        a, b = MetadataIndex("model.down.weight", (0, 0)), MetadataIndex("model.gain", (0,))
        data = metadata.storage_data
        data[b] = data[a]

    edit(step, swap)
    error = refused(step)
    assert error.exit_code == 4
    assert "contradicts the metadata" in str(error)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a\0b", "", "../step/__0_0.distcp"])
def test_paths_that_lead_out_of_the_folder(step: Path, name: str) -> None:
    def lead_out(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    edit(step, lead_out)
    assert isinstance(refused(step), UnsafeError)


def test_a_symlink_that_leads_out_of_the_folder(step: Path, tmp_path: Path) -> None:
    (step / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (step / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert isinstance(refused(step), UnsafeError)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_metadata_that_runs_code(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def poison(metadata: Any) -> None:
        metadata.planner_data["x"] = _Runs()

    edit(step, poison)
    error = refused(step)
    assert isinstance(error, UnsafeError)
    assert "system" in str(error)
    assert not (tmp_path / "executed").exists()


def test_a_value_that_runs_code(tmp_path: Path) -> None:
    save({"model": trained()[0].state_dict(), "extra": _Runs()}, tmp_path / "step")
    assert isinstance(refused(tmp_path / "step"), UnsafeError)


def test_transformed_data(step: Path) -> None:
    def compress(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]

    edit(step, compress)
    error = refused(step)
    assert isinstance(error, NotFoundError)
    assert "stream.zstd" in str(error)


def test_a_missing_file_of_an_index_of_shards(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    weights = trained()[0].state_dict()
    files = {fqn: 1 + number % 2 for number, fqn in enumerate(weights)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "step"), files, save_distributed=True)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    (tmp_path / "step/shard-00001-model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 numbers" in str(refused(tmp_path / "step"))


def test_absurd_shapes_and_paths(step: Path) -> None:
    def grow(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.down.weight"].chunks[0]
        chunk.sizes = (1 << 62, 3)

    original = (step / ".metadata").read_bytes()
    edit(step, grow)
    assert refused(step).exit_code == 4
    for path in [(), ("model", 1 << 40, "x"), ("model", -1), ("model", None), ("a",) * 99, ("model", "gain", "x")]:
        (step / ".metadata").write_bytes(original)
        edit(step, lambda m, path=path: m.planner_data.update({"model.down.weight": path}))  # type: ignore[misc]
        assert refused(step).exit_code == 4, path


def test_files_of_different_steps(tmp_path: Path) -> None:
    """A save over an older checkpoint stopped before every rank had written."""
    model, optimizer = trained()
    states = nested(model, optimizer)[1]
    for name, step in (("old", 1.0), ("new", 2.0)):
        for values in states["state"].values():
            values["step"].fill_(step)
        checkpoint = read(save({"model": model.state_dict(), "optimizer": states}, tmp_path / f"whole-{name}"))
        write(checkpoint, tmp_path / name, 2)
    shutil.copy(tmp_path / "new" / "__1_0.distcp", tmp_path / "old" / "__1_0.distcp")
    error = refused(tmp_path / "old")
    assert error.exit_code == 4
    assert "different steps" in str(error)
    assert "__1_0.distcp" in str(error)


def test_files_left_over_are_said(step: Path) -> None:
    shutil.copy(step / "__0_0.distcp", step / "__5_0.distcp")
    assert any("__5_0.distcp" in note for note in read(step).notes)


def test_without_collectives_every_rank_has_metadata_of_its_own(tmp_path: Path) -> None:
    """Two ranks that save the same tensor hold replicas. If replicas differ, refuse the checkpoint."""
    import torch

    def ranks(shared: list[float], step: Any = 1) -> Path:
        folder = tmp_path / f"step-{len(list(tmp_path.iterdir()))}"
        for rank in range(2):
            part = tmp_path / "part"
            save({"model": {"w": torch.tensor([1.0, shared[rank]])}, "step": step if rank else 0}, part)
            folder.mkdir(exist_ok=True)
            shutil.copy(part / "__0_0.distcp", folder / f"__{rank}_0.distcp")
            metadata = pickle.loads((part / ".metadata").read_bytes())
            for info in metadata.storage_data.values():
                info.relative_path = f"__{rank}_0.distcp"
            (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
            shutil.rmtree(part)
        return folder

    checkpoint = read(ranks([2.0, 2.0]))
    tensor = checkpoint.tensors["w", WEIGHT]
    assert len(tensor.replicas) == 1
    check_replicas(tensor)
    assert checkpoint.state.step == 0
    with pytest.raises(CorruptError):
        check_replicas(read(ranks([2.0, 3.0])).tensors["w", WEIGHT])
    error = refused(ranks([2.0, 2.0], step=torch.ones(3)))
    assert (error.fqn, error.expected, error.found) == ("step", "no tensor", "float32 of shape [3]")
