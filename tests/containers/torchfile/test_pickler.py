"""`ckpt/containers/torchfile/pickler.py`, `calls.py`: Python, torch and ckpt read the written pickles."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import pickle
import pickletools
import subprocess
import sys
import types
from collections import OrderedDict, deque
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.containers.torchfile import unpickle
from ckpt.containers.torchfile.calls import record
from ckpt.containers.torchfile.pickler import Size, StreamedDict, TensorRef, dumps
from ckpt.containers.torchfile.table import GLOBALS
from ckpt.containers.torchfile.values import Array, Global, Record, StoredDict
from ckpt.errors import LossError
from ckpt.plan.dtypes import BY_NAME, FLOAT32

PROTOCOLS = (2, 4)

#: Python interns one-byte `bytes` on reading and would write them only once, so avoid repeats here.
binaries = st.binary().map(lambda data: (data + b"-")[: len(data)])
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(allow_nan=False),
    st.text(),
    binaries,
    st.complex_numbers(allow_nan=False),
    st.builds(bytearray, st.binary()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9)),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), binaries, st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner),
        st.tuples(inner, inner),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(keys),
        st.frozensets(keys),
        st.lists(inner).map(deque),
    ),
    max_leaves=30,
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(value=trees)
@settings(max_examples=300, deadline=None)
def test_both_unpicklers_read_what_was_written(protocol: int, value: Any) -> None:
    data = dumps(value, protocol=protocol)
    theirs, ours = pickle.loads(data), unpickle.loads(data, path="x")
    assert same(theirs, value)
    assert same(ours, value)
    assert dumps(ours, protocol=protocol) == data


def same(a: Any, b: Any) -> bool:
    """Return True if both are equal with the same types at every level. True is not 1, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 999, 1000, 1001, 2500, 70000])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lengths(protocol: int, length: int) -> None:
    value = {
        "list": [str(i) for i in range(length)],
        "dict": {i: -i for i in range(length)},
        "text": "ä" * length,
        "bytes": b"\xff" * length,
        "int": 1 << min(8 * length, 8000),
        "tuple": tuple(range(length)),
    }
    data = dumps(value, protocol=protocol)
    assert pickle.loads(data) == value
    assert unpickle.loads(data, path="x") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner: dict[str, Any] = {"a": [1]}
    array, (array_record,) = [1, 2], (Record("argparse", "Namespace", state={"x": 1}),)
    value = [inner, inner, (inner,), array, array, array_record, {"again": array_record}]
    for loaded in (
        pickle.loads(dumps(value, protocol=protocol)),
        unpickle.loads(dumps(value, protocol=protocol), path="x"),
    ):
        assert loaded[0] is loaded[1] is loaded[2][0] and loaded[3] is loaded[4] and loaded[5] is loaded[6]["again"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_record_may_hold_itself(protocol: int) -> None:
    mesh = Record("argparse", "Namespace", state={})
    mesh.state["root"] = (mesh, [mesh])
    loaded = pickle.loads(dumps(mesh, protocol=protocol))
    assert loaded.root[0] is loaded and loaded.root[1][0] is loaded
    around = (mesh,)
    mesh.state["around"] = around
    loaded = pickle.loads(dumps(around, protocol=protocol))
    assert loaded[0].around[0] is loaded[0]


def objects() -> dict[str, Any]:
    """Return objects found in training states, pickled like their owners do."""
    table = OrderedDict([("b", 1), ("a", torch.float32)])
    table.version = {"": 1}  # type: ignore[attr-defined]
    return {
        "ordered": table,
        "counter": collections.Counter("abracadabra"),
        "namespace": argparse.Namespace(lr=0.1, path="x", nested=argparse.Namespace(a=None)),
        "simple": types.SimpleNamespace(a=1, b=[2]),
        "empty": argparse.Namespace(),
        "size": torch.Size((2, 3)),
        "device": torch.device("cpu"),
        "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.bool],
        "rng": np.random.RandomState(3).get_state(),
        "legacy": np.random.RandomState(3).get_state(legacy=False),
        "generator": np.random.default_rng(3).bit_generator.state,
        "array": np.arange(12, dtype=np.float32).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "objects": np.array([1, "a", None], dtype=object),
        "strings": np.array(["ab", "c"]),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
        "zone": datetime.timezone(datetime.timedelta(hours=2), "x"),
        "date": [datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(1, 2, 3)],
        "slice": slice(1, None, 2),
        "ellipsis": ...,
        "type": int,
        "deque": deque([1, 2], 5),
        "path": PurePosixPath("/a/b"),
    }


@pytest.mark.parametrize("written_in", (2, 4, 5))
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", objects())
def test_objects_survive_our_reading_and_writing(name: str, protocol: int, written_in: int) -> None:
    value = objects()[name]
    ours = unpickle.loads(pickle.dumps(value, written_in), path="x")
    data = dumps(ours, protocol=protocol)
    loaded = pickle.loads(data)
    if isinstance(value, np.ndarray):
        assert loaded.dtype == value.dtype and loaded.flags.f_contiguous == value.flags.f_contiguous
        np.testing.assert_array_equal(loaded, value)
    elif name in ("rng", "legacy"):
        np.testing.assert_equal(loaded, value)
    else:
        assert loaded == value
    if isinstance(value, OrderedDict):
        assert type(loaded) is OrderedDict and loaded.version == value.version and list(loaded) == list(value)
    assert dumps(unpickle.loads(data, path="x"), protocol=protocol) == data


def as_deepspeed_pickles() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [
        LossScaler(128.0),
        DynamicLossScaler(1024, 2.0, 100, 1, 1, False),
        ZeroStageEnum.weights,
        fragment_address(numel=3, start=7),
    ]


def test_deepspeeds_objects() -> None:
    for value in as_deepspeed_pickles():
        for protocol in PROTOCOLS:
            ours = unpickle.loads(pickle.dumps(value, 2), path="x")
            loaded = pickle.loads(dumps(ours, protocol=protocol))
            assert type(loaded) is type(value)
            assert loaded == value or vars(loaded) == vars(value)
    assert pickle.loads(dumps(Record("deepspeed.runtime.zero.config", "ZeroStageEnum", (3,)))).name == "weights"
    state = {"numel": 3, "start": 7}
    made = pickle.loads(dumps(Record("deepspeed.utils.tensor_fragment", "fragment_address", state=state)))
    assert made == as_deepspeed_pickles()[3]


def test_objects_of_distributed_checkpoints() -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))
    value = Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2, 3)), [chunk]),
            "b": BytesStorageMetadata(),
        },
        {"w": ("w",)},
        {MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 24)},
        StorageMeta("x", "y", None),
    )
    data = pickle.dumps(value)
    for protocol in PROTOCOLS:
        loaded = pickle.loads(dumps(with_sizes(unpickle.loads(data, path="x")), protocol=protocol))
        assert loaded == value
        assert type(next(iter(loaded.storage_data)).offset) is torch.Size


def with_sizes(value: Any) -> Any:
    """Convert tuples back to torch.Size. Our reader returns plain tuples, and writers restore the type."""
    root, seen = value, []

    def walk(node: Any) -> None:
        if isinstance(node, Record):
            if isinstance(node.state, dict):
                for key in ("offsets", "sizes", "size", "offset"):
                    if isinstance(node.state.get(key), tuple):
                        node.state[key] = Size(node.state[key])
                for item in node.state.values():
                    walk(item)
        elif isinstance(node, dict):
            for key, item in node.items():
                walk(key)
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)
        seen.append(node)

    walk(root)
    return root


def test_torchs_restricted_unpickler_reads_protocol_2() -> None:
    """The restricted unpickler supports only some opcodes of protocol 2."""
    from torch._weights_only_unpickler import Unpickler

    ordered = StoredDict("OrderedDict")
    ordered["a"] = 1
    ordered.attributes = {"_metadata": {"": {"version": 1}}}
    value = {
        "text": ["ä", "\ud800", "x" * 300],
        "numbers": [0, 255, 256, 65536, -1, 1 << 40, -(1 << 70), 1.5, True, None, 2 + 3j],
        "containers": [[], (), {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}],
        "ordered": ordered,
        "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
        "many": list(range(3000)),
        "again": ["text"] * 300 + [str(i) for i in range(500)] * 2,
        "size": Size((1, 2)),
        "dtype": BY_NAME["bfloat16"],
        "device": Record("torch", "device", ("cpu",)),
    }
    data = dumps(value)
    loaded = Unpickler(io.BytesIO(data)).load()
    ordinary = pickle.loads(data)
    assert loaded == ordinary
    assert type(loaded["size"]) is torch.Size and loaded["dtype"] is torch.bfloat16
    assert loaded["ordered"]._metadata == {"": {"version": 1}}
    assert loaded["containers"][-1] == {1, 2}


def test_nested_classes() -> None:
    nested = Record("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState", (1, 2, 3, 4))
    for protocol in PROTOCOLS:
        data = dumps(nested, protocol=protocol)
        assert unpickle.loads(data, path="x").name == nested.name
        assert pickle.loads(data).local_rank == 1


def test_every_record_class_is_written_by_its_name() -> None:
    for (module, name), entry in GLOBALS.items():
        if isinstance(entry, Global) and entry.build is record:
            for args, state in (((), {"a": 1}), ((1,), None)):
                read = unpickle.loads(dumps(Record(module, name, args, state=state)), path="x")
                assert (read.module, read.name, read.args, read.state) == (module, name, args, state)


def test_numpys_scalar_dtypes() -> None:
    array = Array()
    array.dtype, array.shape, array.data = "<f4", (2,), np.array([1, 2], "<f4").tobytes()
    array.record = Record("numpy", "dtype", ("f4", False, True), state=(3, "<", None, None, None, -1, -1, 0))
    np.testing.assert_array_equal(pickle.loads(dumps(array)), np.array([1, 2], "<f4"))


def test_tensors_ask_for_storages() -> None:
    seen: list[Any] = []

    class Mine:
        pass

    def reference(value: Any) -> TensorRef | None:
        return TensorRef(FLOAT32, "0", 6, 0, (2, 3), (3, 1)) if isinstance(value, Mine) else None

    mine = Mine()
    data = dumps([mine, mine], tensors=reference)
    pickles_ = [(op.name, arg) for op, arg, _ in pickletools.genops(data)]
    assert sum(name == "BINPERSID" for name, _ in pickles_) == 1
    assert ("GLOBAL", "torch._utils _rebuild_tensor_v2") in pickles_ and not seen
    with pytest.raises(LossError, match="object of type"):
        dumps([object()], tensors=reference)


def test_pieces_of_distributed_tensors_are_refused() -> None:
    with pytest.raises(LossError, match="DTensor"):
        dumps(Record("torch.distributed.tensor", "DTensor", (1,)))
    with pytest.raises(ValueError, match="only 2 and 4"):
        dumps(1, protocol=3)


def test_the_same_bytes_in_every_process() -> None:
    code = "from ckpt.containers.torchfile.pickler import dumps;print(dumps({'a', 'b', 'c', 1, None, ('x', 2)}).hex())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(runs) == 1


def test_nothing_is_imported() -> None:
    code = (
        "import sys;"
        "from ckpt.containers.torchfile.pickler import dumps;from ckpt.containers.torchfile.values import Record;"
        "dumps([Record('torch','device',('cpu',)), Record('deepspeed.x','y')]);"
        "assert not {'torch', 'numpy', 'pickle', 'deepspeed'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dict_of_items_that_are_made_meanwhile_is_an_ordinary_one(protocol: int) -> None:
    """Streamed items are not memoized. Equal strings and sizes are, inside the dict and after it."""
    behind = [1, 2]
    items = ((f"k{number}", [Size((number % 3, 7)), "text", [number]]) for number in range(3000))
    dumped = dumps({"streamed": StreamedDict(items), "behind": [behind, behind]}, protocol=protocol)
    loaded = pickle.loads(dumped)
    assert loaded["streamed"] == {
        f"k{number}": [torch.Size((number % 3, 7)), "text", [number]] for number in range(3000)
    }
    assert loaded["behind"][0] is loaded["behind"][1]
    assert loaded["streamed"]["k0"][0] is loaded["streamed"]["k3"][0]
    assert unpickle.loads(dumped, path="x")["streamed"]["k2999"] == [(2, 7), "text", [2999]]
