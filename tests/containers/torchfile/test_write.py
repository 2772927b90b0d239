"""`ckpt/containers/torchfile/write.py`: torch.load and ckpt read the streamed torch files."""

from __future__ import annotations

import os
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.values import Record, StoredDict, StoredTensor
from ckpt.containers.torchfile.write import (
    Bytes,
    FromSource,
    NewStorage,
    NewTensor,
    Zeros,
    copy_of,
    number,
    torch_file,
    torch_item,
)
from ckpt.errors import CorruptError, LossError
from ckpt.move.file_pieces import Hasher
from ckpt.move.run import execute
from ckpt.plan.checkpoint import Checkpoint, SourceFile, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT32, INT64
from ckpt.plan.planner import make_plan
from ckpt.plan.tensors import Box, Extent, FlatRange, Tensor, Whole, whole


def source(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Create a checkpoint with all tensors in one raw file, each with the role `weight`."""
    path = folder / "source.bin"
    found = {}
    with path.open("wb") as file:
        for fqn, tensor in tensors.items():
            dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
            extent = Extent.contiguous(str(path), file.tell(), dtype, tuple(tensor.shape))
            found[fqn, "weight"] = Tensor(fqn, "weight", dtype, tuple(tensor.shape), Whole(extent))
            file.write(bits(tensor))
    return Checkpoint(str(path), "test", found, (SourceFile.stat(str(path)),))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def write(checkpoint: Checkpoint, *files: TargetFile, output: Path) -> Path:
    execute(make_plan(checkpoint, Target(files, dict.fromkeys(checkpoint.tensors, "not of this test"))), output)
    return output


def stored(root: Any) -> bytes:
    """Return a StoredTensor's elements in row-major order."""
    assert isinstance(root, StoredTensor)
    extent = root.extent
    data = Path(extent.path).read_bytes()[extent.offset : extent.end]
    whole_ = torch.frombuffer(bytearray(data), dtype=getattr(torch, extent.dtype.name)) if data else torch.empty(0)
    return bits(torch.as_strided(whole_, extent.shape, extent.strides)) if extent.numel else b""


DTYPES = [dtype for dtype in BY_NAME if hasattr(torch, dtype)]


def test_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        size = BY_NAME[name].itemsize
        raw = torch.randint(0, 2 if name == "bool" else 256, (15 * size,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(3, 5)
        tensors[name + ".scalar"] = raw[:size].view(dtype).reshape(())
        tensors[name + ".empty"] = raw[:0].view(dtype).reshape(0, 4)
    checkpoint = source(tmp_path, tensors)
    root = {fqn: copy_of(tensor) for (fqn, _), tensor in checkpoint.tensors.items()}
    path = write(checkpoint, torch_file("model.pt", root), output=tmp_path / "out") / "model.pt"
    ours = torchfile.read(path).root
    for options in ({"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}):
        loaded = torch.load(path, **options)
        assert list(loaded) == list(tensors)
        for fqn, tensor in tensors.items():
            assert loaded[fqn].dtype == tensor.dtype and loaded[fqn].shape == tensor.shape
            assert bits(loaded[fqn]) == bits(tensor)
            assert stored(ours[fqn]) == bits(tensor)


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    data = path.read_bytes()
    found = {}
    for entry in entries:
        name_size, extra_size = struct.unpack_from("<HH", data, entry.header_offset + 26)
        start = entry.header_offset + 30 + name_size + extra_size
        found[f"{entry.filename}@{start}"] = data[start : start + entry.file_size]
    return found


def test_container_is_torchs_own_to_the_byte(tmp_path: Path) -> None:
    """Every byte is equal except checksums, `data.pkl` and the id that torch hashes."""
    shapes = [(3, 5), (0,), (1000,), (7,)]
    tensors = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    checkpoint = source(tmp_path, tensors)
    theirs_folder, ours_folder = tmp_path / "theirs", tmp_path / "ours"
    theirs_folder.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, theirs_folder / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    root = {fqn: copy_of(tensor) for (fqn, _), tensor in checkpoint.tensors.items()}
    write(checkpoint, torch_file("m.pt", root), output=ours_folder)
    theirs, ours = records(theirs_folder / "m.pt"), records(ours_folder / "m.pt")
    assert [name.partition("@")[0] for name in theirs] == [name.partition("@")[0] for name in ours]
    assert all(int(name.partition("@")[2]) % 64 == 0 for name in ours)
    shift = {n.partition("@")[0]: int(n.partition("@")[2]) for n in theirs}
    moved = {n.partition("@")[0]: int(n.partition("@")[2]) for n in ours}
    assert len({moved[name] - shift[name] for name in shift if "pkl" not in name}) == 1


@pytest.mark.parametrize("debug", ["0", "1"])
def test_torch_can_compute_the_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    """`calculate_storage_offsets` expects miniz's layout. With TORCH_SERIALIZATION_DEBUG, torch checks every offset."""
    from torch.utils.serialization import config

    tensors = {f"w{i}": torch.randn(i % 7, 3) for i in range(50)}
    checkpoint = source(tmp_path, tensors)
    root = {fqn: copy_of(tensor) for (fqn, _), tensor in checkpoint.tensors.items()}
    path = write(checkpoint, torch_file("m.pt", root), output=tmp_path / "out") / "m.pt"
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", debug)
    with config.patch({"load.calculate_storage_offsets": True}):
        loaded = torch.load(path, mmap=True)
    assert all(bits(loaded[fqn]) == bits(tensor) for fqn, tensor in tensors.items())


def test_flat_buffers_padding_and_casts(tmp_path: Path) -> None:
    a, b = torch.randn(3, 5), torch.randn(7)
    checkpoint = source(tmp_path, {"a": a, "b": b})
    fill = (
        FromSource(("a", "weight"), FlatRange(4, 15), 0),
        FromSource(("b", "weight"), whole((7,)), 11),
        Zeros(3, 18),
        FromSource(("a", "weight"), FlatRange(0, 4), 21),
        Bytes(struct.pack("<2f", 1.5, -2.5), 25),
    )
    flat = NewTensor(FLOAT32, (27,), fill)
    rounded = NewTensor(BFLOAT16, (2, 5), (FromSource(("a", "weight"), Box((1, 0), (2, 5))),))
    root = {"flat": flat, "rounded": rounded}
    path = write(checkpoint, torch_file("x/y/part.pt", root), output=tmp_path / "out") / "x/y/part.pt"
    loaded = torch.load(path)
    expected = torch.cat([a.reshape(-1)[4:], b, torch.zeros(3), a.reshape(-1)[:4], torch.tensor([1.5, -2.5])])
    assert bits(loaded["flat"]) == bits(expected)
    assert bits(loaded["rounded"]) == bits(a[1:].bfloat16())


def test_shared_storages_views_and_identity(tmp_path: Path) -> None:
    a = torch.arange(20.0).reshape(4, 5)
    checkpoint = source(tmp_path, {"a": a})
    storage = NewStorage(FLOAT32, 20, (FromSource(("a", "weight"), whole((4, 5))),))
    tied = NewTensor(FLOAT32, (4, 5), storage=storage)
    root = OrderedDict
    tree = StoredDict("OrderedDict")
    tree.update(
        embed=tied,
        head=NewTensor(FLOAT32, (4, 5), storage=storage),
        same=tied,
        transposed=NewTensor(FLOAT32, (5, 4), storage=storage, strides=(1, 5)),
        row=NewTensor(FLOAT32, (5,), storage=storage, offset=10),
    )
    path = write(checkpoint, torch_file("m.bin", tree), output=tmp_path / "out") / "m.bin"
    loaded = torch.load(path)
    assert type(loaded) is root
    assert loaded["embed"] is loaded["same"]
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
    assert (
        torch.equal(loaded["transposed"], a.T) and torch.equal(loaded["row"], a[2]) and torch.equal(loaded["head"], a)
    )
    assert path.stat().st_size < 5000
    ours = torchfile.read(path).root
    assert ours["embed"].extent == ours["head"].extent
    assert ours["transposed"].extent.strides == (1, 5)


def test_parameters_attributes_and_records(tmp_path: Path) -> None:
    a = torch.randn(4)
    checkpoint = source(tmp_path, {"a": a})
    fill = (FromSource(("a", "weight"), whole((4,))),)
    root = {
        "parameter": NewTensor(FLOAT32, (4,), fill, requires_grad=True, parameter=True),
        "marked": NewTensor(FLOAT32, (4,), fill, attributes={"ds_id": "x_0"}),
        "both": NewTensor(FLOAT32, (4,), fill, requires_grad=True, parameter=True, attributes={"ds_id": 3}),
        "placeholder": NewTensor(BFLOAT16, (0,), attributes={"ds_shape": (2, 2)}),
        "requires": NewTensor(FLOAT32, (4,), fill, requires_grad=True),
        "step": number(7),
        "count": number(1 << 40, INT64),
        "shape": Size((2, 3)),
        "device": Record("torch", "device", ("cpu",)),
    }
    path = write(checkpoint, torch_file("m.pt", root), output=tmp_path / "out") / "m.pt"
    for weights_only in (True, False):
        loaded = torch.load(path, weights_only=weights_only)
        assert type(loaded["parameter"]) is torch.nn.Parameter and loaded["parameter"].requires_grad
        assert loaded["marked"].ds_id == "x_0" and type(loaded["marked"]) is torch.Tensor
        assert type(loaded["both"]) is torch.nn.Parameter and loaded["both"].ds_id == 3
        assert loaded["placeholder"].ds_shape == (2, 2) and loaded["placeholder"].dtype is torch.bfloat16
        assert loaded["requires"].requires_grad and not loaded["marked"].requires_grad
        assert loaded["step"].dtype is torch.float32 and loaded["step"].item() == 7 and loaded["step"].shape == ()
        assert loaded["count"].item() == 1 << 40
        assert type(loaded["shape"]) is torch.Size and loaded["shape"] == (2, 3)
        assert loaded["device"] == torch.device("cpu")
    ours = torchfile.read(path).root
    assert ours["both"].attributes == {"ds_id": 3} and ours["both"].requires_grad


def test_an_item_within_another_file(tmp_path: Path) -> None:
    a = torch.randn(9, 3)
    checkpoint = source(tmp_path, {"a": a})
    item = torch_item(copy_of(checkpoint.tensors["a", "weight"]))
    name, (slot,) = "__0_0.distcp", item.slots
    literals = [(0, b"\1" * 1000), *((1000 + offset, data) for offset, data in item.literals)]
    slot = slot._replace(extent=slot.extent._replace(path=name, offset=1000 + slot.extent.offset))
    file = TargetFile(name, 1000 + item.size, tuple(literals), (slot,))
    path = write(checkpoint, file, output=tmp_path / "out") / name
    with path.open("rb") as f:
        f.seek(1000)
        import io

        assert torch.equal(torch.load(io.BytesIO(f.read(item.size)), weights_only=True), a)
    assert stored(torchfile.read(path, 1000, item.size).root) == bits(a)


def test_tensors_of_a_training_state_are_carried_along(tmp_path: Path) -> None:
    base = torch.arange(40.0).reshape(5, 8)
    state = {"rng": torch.get_rng_state(), "view": base[1:4, ::2], "empty": torch.zeros(0, 3), "lr": torch.tensor(1e-3)}
    torch.save(state, tmp_path / "state.pt")
    root = torchfile.read(tmp_path / "state.pt").root
    checkpoint = source(tmp_path, {"a": torch.zeros(1)})
    path = write(checkpoint, torch_file("m.pt", root), output=tmp_path / "out") / "m.pt"
    loaded = torch.load(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert loaded["view"].stride() == state["view"].stride()


def test_a_large_tensor_is_not_carried_along(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(1 << 27)
    big = StoredTensor(Extent.contiguous(str(tmp_path / "big"), 0, FLOAT32, (1 << 25,)))
    with pytest.raises(LossError, match="too large to copy"):
        torch_file("m.pt", {"x": big})


@pytest.mark.parametrize("name", ["Größe.pt", "no_suffix", "a.b.c.pt", "with space.pt"])
def test_file_names(tmp_path: Path, name: str) -> None:
    checkpoint = source(tmp_path, {"a": torch.ones(3)})
    root = {"a": copy_of(checkpoint.tensors["a", "weight"])}
    path = write(checkpoint, torch_file(name, root), output=tmp_path / "out") / name
    assert torch.equal(torch.load(path)["a"], torch.ones(3))
    (tmp_path / "theirs").mkdir()
    torch.save({"a": torch.ones(3)}, tmp_path / "theirs" / name)
    folders = [
        n.filename.split("/")[0] for f in (path, tmp_path / "theirs" / name) for n in zipfile.ZipFile(f).filelist
    ]
    assert len(set(folders)) == 1
    assert torchfile.read(path).root["a"].shape == (3,)


@pytest.fixture
def undigested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't read a sparse file's zeros for their digest."""
    monkeypatch.setattr(Hasher, "rest", lambda *_: "")


@pytest.mark.usefixtures("undigested")
def test_more_than_four_gib(tmp_path: Path) -> None:
    """The sparse file has a storage above 4 GiB and offsets beyond 4 GiB after it."""
    a = torch.randn(5)
    checkpoint = source(tmp_path, {"a": a})
    numel = (1 << 32) + 100
    part = FromSource(("a", "weight"), whole((5,)), 0)
    after = FromSource(("a", "weight"), whole((5,)), (1 << 30) + 20)
    root = {
        "before": copy_of(checkpoint.tensors["a", "weight"]),
        "big": NewTensor(BY_NAME["uint8"], (numel,), (Zeros(numel),)),
        "late": NewTensor(FLOAT32, ((1 << 30) + 25,), (part, Zeros((1 << 30) + 15, 5), after)),
        "empty": NewTensor(FLOAT32, (0,)),
        "after": copy_of(checkpoint.tensors["a", "weight"]),
    }
    path = write(checkpoint, torch_file("m.pt", root), output=tmp_path / "out") / "m.pt"
    assert path.stat().st_blocks * 512 < 10 << 20, "zeros are written"
    loaded = torch.load(path, mmap=True)
    assert loaded["big"].shape == (numel,) and loaded["big"][-1] == 0
    for found in (loaded["before"], loaded["late"][:5], loaded["late"][-5:], loaded["after"]):
        assert torch.equal(found, a)
    ours = torchfile.read(path).root
    with path.open("rb") as file:
        for extent in (ours["before"].extent, ours["after"].extent, ours["late"].extent):
            file.seek(extent.end - 20)
            assert file.read(20) == bits(a)
    os.unlink(path)


@pytest.mark.usefixtures("undigested")
def test_big_offsets_are_as_torch_computes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.serialization import config

    checkpoint = source(tmp_path, {"a": torch.randn(5)})
    big = NewTensor(BY_NAME["uint8"], ((1 << 32) - 1,), (Zeros((1 << 32) - 1),))
    small = copy_of(checkpoint.tensors["a", "weight"])
    path = (
        write(
            checkpoint,
            torch_file("m.pt", [small, big, small, NewTensor(FLOAT32, (0,)), number(3)]),
            output=tmp_path / "out",
        )
        / "m.pt"
    )
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch({"load.calculate_storage_offsets": True}):
        assert torch.load(path, mmap=True)[4] == 3
    os.unlink(path)


def test_a_wrong_checksum_does_not_hinder_torch(tmp_path: Path) -> None:
    """Moved elements get CRC-32 0. This works because torch's reader doesn't check it."""
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(100)}, path)
    data = bytearray(path.read_bytes())
    entry = data.rfind(b"PK\1\2", 0, data.find(b"m/data/0", data.find(b"PK\1\2")))
    data[entry + 16 : entry + 20] = b"\xde\xad\xbe\xef"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "m/data/0"
    for mmap in (False, True):
        assert torch.equal(torch.load(path, mmap=mmap)["a"], torch.ones(100))


def test_same_bytes_again(tmp_path: Path) -> None:
    def layout() -> TargetFile:
        return torch_file("m.pt", {"s": {"b", "a", "c"}, "t": number(1), "z": [1, {"x": (1, "y")}]})

    assert layout() == layout()


def test_a_storage_whose_pieces_are_not_all_there_is_not_written() -> None:
    hole = NewTensor(FLOAT32, (4,), (Zeros(1, 0), Zeros(2, 2)))
    short = NewTensor(FLOAT32, (4,), (Zeros(3),))
    for tensor in (hole, short):
        with pytest.raises(CorruptError, match="stored nowhere, or twice"):
            torch_file("m.pt", tensor)


def test_a_tensor_outside_its_storage_is_a_writers_bug() -> None:
    with pytest.raises(AssertionError):
        torch_file("m.pt", NewTensor(FLOAT32, (4,), storage=NewStorage(FLOAT32, 3, (Zeros(3),))))
