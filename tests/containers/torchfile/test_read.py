"""`ckpt/containers/torchfile/read.py`, `values.py`: torch's containers are read bit for bit, and nothing else is."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.values import Array, Record, Storage, StoredDict, StoredTensor
from ckpt.errors import CkptError, CorruptError, NotFoundError, UnsafeError
from tests.support.hostile import make
from tests.support.places import REPOSITORY

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def save(value: Any, path: Path, container: str = "zip", protocol: int = 2) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=container == "zip", pickle_protocol=protocol)
    return str(path)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor with random bits. It may include NaN payloads, -0.0 and subnormals."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = torch.from_numpy(np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8))
    if dtype is torch.bool:
        data = data & 1
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def elements(stored: StoredTensor) -> bytes:
    """Return a stored tensor's elements in row-major order."""
    extent = stored.extent
    data = Path(extent.path).read_bytes()
    assert extent.end <= len(data)
    strides = tuple(n * extent.dtype.itemsize for n in extent.strides)
    view = (
        np.ndarray(extent.shape, f"V{extent.dtype.itemsize}", data, extent.offset, strides)
        if extent.numel
        else np.empty(extent.shape, f"V{extent.dtype.itemsize}")
    )
    return view.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(stored: Any, tensor: torch.Tensor) -> None:
    assert isinstance(stored, StoredTensor)
    assert f"torch.{stored.dtype}" == str(tensor.dtype)
    assert stored.shape == tuple(tensor.shape)
    assert stored.requires_grad == tensor.requires_grad
    assert elements(stored) == bits(tensor)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    attributed = torch.ones(3)
    attributed.ds_id = "0_7"
    made = {str(dtype): random_bits(dtype, 3, 4) for dtype in DTYPES}
    made |= {f"0-d {dtype}": random_bits(dtype, 1).view(()) for dtype in DTYPES}
    made |= {
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "expanded": torch.tensor([7.0]).expand(5, 3),
        "empty": torch.empty(0),
        "empty with dims": torch.empty(3, 0, 2),
        "empty of a view": base[4:],
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "frozen parameter": torch.nn.Parameter(torch.randn(5), requires_grad=False),
        "requires grad": torch.ones(2, requires_grad=True),
        "attributes": attributed,
    }
    return made


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_tensors_bit_for_bit(tmp_path: Path, container: str, protocol: int) -> None:
    made = tensors()
    if container == "legacy":  # legacy refuses a storage saved with two dtypes, and a reused address looks like one
        made = {name: tensor.clone() if tensor.numel() == 0 else tensor for name, tensor in made.items()}
    path = save(made, tmp_path / "a.pt", container, protocol)
    # torch writes dtypes without a storage class to a legacy file, but can't load them.
    loaded = torch.load(path, weights_only=False) if container == "zip" else made
    file = torchfile.read(path)
    assert file.container == container
    assert file.size == os.path.getsize(path)
    assert list(file.root) == list(made)
    for name, tensor in made.items():
        assert_same(file.root[name], tensor)
        assert bits(loaded[name]) == bits(tensor)
    assert file.root["attributes"].attributes == {"ds_id": "0_7"}
    assert file.root["base"].attributes is None
    # Views share their storage.
    extents = {name: file.root[name].extent for name in ("base", "row", "transposed")}
    assert extents["row"].offset == extents["base"].offset + 6 * 4
    assert extents["transposed"].strides == (1, 6)
    assert file.root["expanded"].extent.strides == (0, 0)


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_parameters_with_attributes_and_bare_storages(tmp_path: Path, container: str) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.note = {"a": 1}
    storage = torch.arange(5, dtype=torch.uint8).untyped_storage()
    file = torchfile.read(save([parameter, torch.nn.Buffer(torch.ones(2)), storage], tmp_path / "a.pt", container))
    assert_same(file.root[0], parameter)
    assert file.root[0].attributes == {"note": {"a": 1}}
    assert_same(file.root[1], torch.ones(2))
    assert isinstance(file.root[2], Storage)
    assert Path(file.path).read_bytes()[file.root[2].offset :][:5] == bytes(range(5))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_tensors_saved_from_an_xla_device(tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved as copies on the CPU. Here only the device's name is XLA's."""
    made = tensors()
    made["state"] = torch.nn.Buffer(torch.arange(4.0))
    made["parameter with attributes"] = torch.nn.Parameter(torch.arange(3.0))
    made["parameter with attributes"].note = 1
    made = {name: tensor for name, tensor in made.items() if tensor.numel()}
    real, on_xla = torch.Tensor.device, {tensor.data_ptr() for tensor in made.values()}
    with monkeypatch.context() as patch:
        xla = property(lambda self: torch.device("xla:0") if self.data_ptr() in on_xla else real.__get__(self))
        patch.setattr(torch.Tensor, "device", xla)
        patch.setattr(torch.Tensor, "cpu", lambda self: self.detach().clone())
        path = save(made, tmp_path / "a.pt", container)
    assert b"_rebuild_device_tensor_from_cpu_tensor" in Path(path).read_bytes()
    loaded = torch.load(path, map_location="cpu") if container == "zip" else made  # as above
    file = torchfile.read(path)
    assert list(file.root) == list(made)
    for name in made:
        assert_same(file.root[name], loaded[name])
        assert bits(loaded[name]) == bits(made[name])
    assert file.root["attributes"].attributes == {"ds_id": "0_7"}
    assert file.root["parameter with attributes"].attributes == {"note": 1}


def test_an_xla_tensor_with_data_in_another_dtype_is_refused(tmp_path: Path) -> None:
    """A load by torch would cast it. A save by torch never needs that."""

    class OnXla:
        def __reduce__(self) -> Any:
            function: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor
            return function, (torch.ones(2), torch.float64, "xla:0", False)

    with pytest.raises(CorruptError, match="a device tensor with data in another dtype"):
        torchfile.read(save(OnXla(), tmp_path / "a.pt"))


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_within_another_file(tmp_path: Path, container: str) -> None:
    """DCP's `.distcp` files contain several torch files in a row."""
    first, second = torch.randn(7), torch.randn(3)
    a = Path(save({"w": first}, tmp_path / "a.pt", container)).read_bytes()
    b = Path(save({"w": second}, tmp_path / "b.pt", container)).read_bytes()
    whole = tmp_path / "__0_0.distcp"
    whole.write_bytes(b"before" + a + b + b"after")
    assert_same(torchfile.read(str(whole), 6, len(a)).root["w"], first)
    assert_same(torchfile.read(str(whole), 6 + len(a), len(b)).root["w"], second)
    whole.write_bytes(b"before" + b)
    assert_same(torchfile.read(str(whole), 6).root["w"], second)
    for offset, length in ((0, None), (6, len(b) - 1), (7, None), (6, len(b) + 1), (-1, 5), (1 << 40, 1)):
        with pytest.raises(CkptError):
            torchfile.read(str(whole), offset, length)


def test_checksums_and_skipped_data(tmp_path: Path) -> None:
    value = {"w": torch.randn(4)}
    file = torchfile.read(save(value, tmp_path / "a.pt"))
    assert file.records["data/0"].crc32 is not None
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file = torchfile.read(save(value, tmp_path / "b.pt"))
    finally:
        torch.serialization.set_crc32_options(before)
    assert file.records["data/0"].crc32 is None
    assert_same(file.root["w"], value["w"])


def test_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file needs 64-bit sizes and offsets."""
    with torch.serialization.skip_data():
        path = save([torch.empty(2), torch.empty(5 << 30, dtype=torch.uint8), torch.empty(3)], tmp_path / "big.pt")
    first, large, last = torchfile.read(path).root
    assert large.extent.nbytes == 5 << 30
    assert first.extent.offset < large.extent.offset < 1 << 20
    assert last.extent.offset > 5 << 30
    assert last.extent.end < os.path.getsize(path)


def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    spare = [make.Record(f"x/data/{i}".encode(), b"") for i in range(1, 65_600)]
    (tmp_path / "many.pt").write_bytes(make.archive(make.records() + spare))
    assert_same(torchfile.read(str(tmp_path / "many.pt")).root, torch.arange(1.0, 5.0))


def test_an_archive_of_another_zip_writer(tmp_path: Path) -> None:
    """A common zip tool writes other headers, no alignment, and checksums before the data."""
    value = {"w": torch.randn(4)}
    path = save(value, tmp_path / "a.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=name.endswith("0")) as record:
                record.write(old.read(name))
    assert_same(torchfile.read(str(tmp_path / "b.pt")).root["w"], value["w"])


def test_folder_names(tmp_path: Path) -> None:
    for name in ("archive.pt", "no_suffix", "a.b.c.bin", "漢字.pt"):
        assert_same(torchfile.read(save([torch.ones(1)], tmp_path / name)).root[0], torch.ones(1))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_of_deepspeed(tmp_path: Path, protocol: int) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2**16, 1000, 1.0, 1, False, dtype=torch.half)
    value = {
        "loss_scaler": LossScaler(4.0),
        "dynamic": scaler,
        "zero_stage": ZeroStageEnum.gradients,
        "param_slice_mappings": [collections.OrderedDict(w=fragment_address(3, 4))],
        "shape": torch.Size([2, 3]),
        "flat": (whole := torch.randn(10))[:7],
        "device": torch.device("cuda:1"),
        "args": argparse.Namespace(params_dtype=torch.bfloat16),
    }
    root = torchfile.read(save(value, tmp_path / "a.pt", protocol=protocol)).root
    assert root["loss_scaler"].typename == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert (root["loss_scaler"].get("cur_scale"), root["loss_scaler"].get("dynamic")) == (4.0, False)
    assert root["dynamic"].attributes.keys() == vars(scaler).keys()
    assert root["dynamic"].get("dtype").name == "float16"
    assert (root["zero_stage"].name, root["zero_stage"].value) == ("ZeroStageEnum", 2)
    (groups,) = root["param_slice_mappings"]
    assert isinstance(groups, StoredDict)
    assert groups["w"].attributes == {"numel": 3, "start": 4}
    assert root["shape"] == (2, 3)
    assert_same(root["flat"], whole[:7])
    assert root["device"].args == ("cuda", 1)
    assert root["args"].get("params_dtype").name == "bfloat16"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_random_states(tmp_path: Path, protocol: int) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "generator": torch.Generator().manual_seed(3),
    }
    root = torchfile.read(save(state, tmp_path / "rng.pth", protocol=protocol)).root
    assert root["python"] == state["python"]
    keys = root["numpy"][1]
    assert isinstance(keys, Array)
    assert np.array_equal(np.frombuffer(keys.data, keys.dtype), state["numpy"][1])
    assert_same(root["cpu"], state["cpu"])
    assert isinstance(root["generator"], Record)


def test_distributed_tensors_are_records(tmp_path: Path) -> None:
    """The test uses its own process because a process group is global state."""
    code = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
whole = DTensor.from_local(torch.full((2, 4), 5.0), mesh, [Shard(0), Replicate()])
spec = ChunkShardingSpec(dim=0, placements=[f"rank:{i}/cpu" for i in range(4)])
torch.save({"d": whole, "p": torch.nn.Parameter(whole), "s": sharded_tensor.zeros(spec, 8, 4)}, sys.argv[1])
"""
    path = str(tmp_path / "sharded.pt")
    subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True)
    root = torchfile.read(path).root
    assert root["d"].typename == "torch.distributed.tensor.DTensor"
    assert_same(root["d"].get("_local_tensor"), torch.full((2, 4), 5.0))
    spec = root["d"].get("_spec")
    assert spec.get("tensor_meta").get("shape") == (4, 4)
    assert [(p.name, p.get("dim")) for p in spec.get("placements")] == [("Shard", 0), ("Replicate", None)]
    assert spec.get("mesh").get("_mesh_dim_names") == ("a", "b")
    assert isinstance(root["p"], Record)
    shards, metadata, group, _, _ = root["s"].state
    assert_same(shards[0].get("tensor"), torch.zeros(2, 4))
    assert shards[0].get("metadata").get("shard_offsets") == [2, 0]
    assert metadata.get("size") == (8, 4)
    assert group.get("global_world_size") == 4


def test_metadata_of_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from ckpt.containers.torchfile.unpickle import load_pickle

    value = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}, "step": 3}
    dcp.save(value, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = load_pickle(tmp_path / "dcp/.metadata")
    tensor = metadata.get("state_dict_metadata")["model.w"]
    assert tensor.get("size") == (2, 3)
    assert tensor.get("properties").get("dtype").name == "float32"
    assert tensor.get("chunks")[0].get("sizes") == (2, 3)
    seen = set()
    for index, info in metadata.get("storage_data").items():
        item = torchfile.read(str(tmp_path / "dcp" / info.get("relative_path")), info.get("offset"), info.get("length"))
        seen.add(index.get("fqn"))
        if index.get("fqn") == "step":
            assert item.root == 3
        else:
            assert_same(item.root, value["model"][index.get("fqn").removeprefix("model.")])
    assert seen == {"model.w", "model.b", "step"}


UNSUPPORTED = {
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.ones(2)),
    "unsupported content": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "torch.nn.modules.linear.Linear": lambda: torch.nn.Linear(2, 2),
    "torch.nn.functional.relu": lambda: torch.nn.functional.relu,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_named(tmp_path: Path, what: str) -> None:
    path = save({"x": UNSUPPORTED[what]()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeError, match=what):
        torchfile.read(path)


def test_other_files_are_named(tmp_path: Path) -> None:
    def refused(content: bytes | None, match: str, error: type[CkptError] = NotFoundError) -> None:
        if content is not None:
            (tmp_path / "x").write_bytes(content)
        with pytest.raises(error, match=match):
            torchfile.read(str(tmp_path / "x"))

    refused(pickle.dumps({"a": 1}), "plain pickle")
    refused(b"hello", "not a file written by torch.save")
    with tarfile.open(tmp_path / "x", "w") as tar:
        tar.add(__file__, "storages")
    refused(None, "tar file")
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("word/document.xml", "<x/>")
    refused(None, "not written by torch.save")
    with zipfile.ZipFile(tmp_path / "x", "w"):
        pass
    refused(None, "not written by torch.save")
    (tmp_path / "x").unlink()
    refused(None, "no such file")
    (tmp_path / "x").mkdir()
    refused(None, "not a regular file", CorruptError)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_as_a_program(tmp_path: Path) -> None:
    path = str(tmp_path / "script.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(UnsafeError, match="TorchScript"):
        torchfile.read(path)


def test_truncation_says_how_long_the_file_is(tmp_path: Path) -> None:
    path = save({"w": torch.randn(1000)}, tmp_path / "a.pt")
    size = os.path.getsize(path)
    os.truncate(path, size - 10)
    with pytest.raises(CorruptError) as error:
        torchfile.read(path)
    assert error.value.path == path
    assert error.value.expected == f"{size} bytes or more"
    assert error.value.found == f"{size - 10} bytes"
    os.truncate(path, 0)
    with pytest.raises(CorruptError, match="empty"):
        torchfile.read(path)


def test_a_legacy_file_of_a_big_endian_machine(tmp_path: Path) -> None:
    path = Path(save([torch.ones(1)], tmp_path / "a.pt", "legacy"))
    data = path.read_bytes()
    at = data.index(b"little_endian") + len(b"little_endian")
    path.write_bytes(data[:at] + data[at:].replace(b"\x88", b"\x89", 1))
    with pytest.raises(UnsafeError, match="big-endian"):
        torchfile.read(str(path))


def test_a_legacy_file_longer_than_the_first_step(tmp_path: Path) -> None:
    """The length of a legacy pickle is not stored, so the reader takes growing steps."""
    value = {"text": "x" * 3_000_000, "w": torch.randn(5)}
    root = torchfile.read(save(value, tmp_path / "a.pt", "legacy")).root
    assert root["text"] == value["text"]
    assert_same(root["w"], value["w"])


# --- damage ---


CHILD = r"""
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
sys.path.insert(0, sys.argv[1])
from ckpt.containers.torchfile import read as torchfile
from ckpt.errors import CkptError
from ckpt.containers.torchfile.values import StoredTensor
outcomes = {}
def attempt(label, content):
    with open("x", "wb") as file:
        file.write(content)
    try:
        root = torchfile.read("x").root
    except CkptError as error:
        outcome = type(error).__name__
    except BaseException as error:
        print(json.dumps([label, repr(error)]))
        sys.exit(1)
    else:
        outcome = "read"
        for value in root.values() if isinstance(root, dict) else ():
            if isinstance(value, StoredTensor):
                assert 0 <= value.extent.offset <= value.extent.end <= len(content), label
    outcomes.setdefault(outcome, []).append(label)
data = open(sys.argv[2], "rb").read()
for end in range(0, len(data), 2):
    attempt(end, data[:end])
truncated, outcomes = outcomes, {}
for at in range(len(data)):
    for bit in (at % 8,) if at % 4 else range(8):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        attempt([at, bit], changed)
flipped, outcomes = outcomes, {}
for length in range(1, len(data), 5):
    attempt(length, data[:-length] + bytes(length))
print(json.dumps([truncated, flipped, outcomes]))
"""


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_every_truncation_bit_and_zeroed_tail(tmp_path: Path, container: str) -> None:
    """Damaged files raise CkptError or are read within their bounds."""
    value = {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16), "step": 3}
    path = save(value, tmp_path / "a.pt", container)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(REPOSITORY), path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    truncated, flipped, zeroed = json.loads(done.stdout)
    # The rest may resemble another kind of file, but is never read.
    assert set(truncated) <= {"CorruptError", "IncompleteError", "NotFoundError"}
    assert truncated.get("NotFoundError", []) == [2 * (i + 1) for i in range(len(truncated.get("NotFoundError", [])))]
    refused = [*truncated.get("CorruptError", ()), *truncated.get("IncompleteError", ())]
    assert len(refused) > 0.45 * os.path.getsize(path)
    if container == "zip":
        # The last two bytes are always zero.
        assert zeroed == {"read": [1], "CorruptError": zeroed["CorruptError"]}
        # Unnoticed flips are in tensors, padding, descriptors and unused fields (times, versions).
        pickled = range(64, 64 + zipfile.ZipFile(path).infolist()[0].file_size)
        assert not [at for at, _ in flipped["read"] if at in pickled]
    assert len(flipped["CorruptError"]) > 50
