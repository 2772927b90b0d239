"""`ckpt/containers/torchfile/machine.py`, `unpickle.py`, `table.py`, `calls.py`: the unpickler imports nothing."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import importlib
import io
import json
import os
import pathlib
import pickle
import random
import signal
import struct
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.containers.torchfile import machine, table, unpickle
from ckpt.containers.torchfile.machine import OPCODES
from ckpt.containers.torchfile.table import GLOBALS
from ckpt.containers.torchfile.values import MAX_DEPTH, Array, Global, Record, StoredDict
from ckpt.errors import CkptError, CorruptError, NotFoundError, UnsafeError, UsageError
from ckpt.plan import dtypes
from tests.support.hostile import ROOT, make

PROTOCOLS = range(6)


def loads(data: bytes) -> Any:
    return unpickle.loads(data, path="test.pkl")


def plain(value: Any) -> Any:
    """Return `value` with plain dicts for dict subclasses and numpy's arrays."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, Array):
        return as_numpy(value)
    return value


def as_numpy(array: Array) -> np.ndarray:
    if array.objects is not None:
        flat = np.empty(len(array.objects), object)
        flat[:] = array.objects
        return flat.reshape(array.shape)
    order = "F" if array.fortran else "C"
    return np.frombuffer(array.data, array.dtype).reshape(array.shape, order=order)


# --- pickles from Python and the frameworks ---


PLAIN = {
    "none": None,
    "bools": [True, False],
    "small integers": [0, 1, 255, 256, 65535, 65536, -1, -128, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**63)],
    "large integers": [2**100, -(2**100), 2**1000, -(2**2000)],
    "floats": [0.0, -0.0, 1.5, -1e300, 5e-324, float("inf"), -float("inf")],
    "text": ["", "ascii", "é", "漢字", "\U0001f600", "a\nb\\c'd\"", "x" * 300, "\ud800"],
    "bytes": [b"", b"a\xff\0", b"x" * 300, b"y" * 70_000],
    "bytearray": [bytearray(), bytearray(b"a\xff\0")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "dicts": [{}, {"a": 1}, {1: "int", "x": 1.0, None: 0, (1, "b"): 2, False: 3, b"k": 4, 1.5: 6}],
    "sets": [set(), {1, 2, "x"}, frozenset(), frozenset([1, (2, 3)])],
    "long list": list(range(5000)),
    "long dict": {f"k{i}": i for i in range(5000)},
    "complex": [1j, complex(-0.0, 2)],
    "slices": [slice(None), slice(1, 2, 3)],
    "ranges": [range(5), range(1, 10, 2)],
    "ordered": collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),
    "default": collections.defaultdict(list, {"a": [1]}),
    "counter": collections.Counter("hello"),
    "deque": [collections.deque([1, 2], 5), collections.deque()],
    "ellipsis": ...,
    "paths": [pathlib.PurePosixPath("/a/b c"), pathlib.PureWindowsPath("C:\\x")],
    "times": [
        datetime.datetime(2024, 1, 2, 3, 4, 5, 678901),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "here")),
        datetime.date(1999, 12, 31),
        datetime.time(1, 2, 3, 4),
        datetime.timedelta(-1, 2, 3),
        datetime.timezone.utc,
    ],
    "python rng": random.Random(5).getstate(),
    "shared": (lambda x: [x, x, {"again": x}])(["one"]),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_those_of_pickle(name: str, protocol: int) -> None:
    data = pickle.dumps(PLAIN[name], protocol)
    assert plain(loads(data)) == PLAIN[name]
    assert repr(plain(loads(data))) == repr(plain(PLAIN[name]))


def test_shared_objects_stay_shared() -> None:
    first, second = loads(pickle.dumps([x := ["one"], x]))
    assert first is second


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dicts_know_their_kind_and_attributes(protocol: int) -> None:
    state = collections.OrderedDict(weight=1)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as nn.Module.state_dict() does
    got = loads(pickle.dumps([state, collections.Counter("a"), collections.defaultdict(int), {}], protocol))
    assert [getattr(d, "kind", None) for d in got] == ["OrderedDict", "Counter", "defaultdict", None]
    assert got[0].attributes == {"_metadata": {"": {"version": 1}}}
    assert isinstance(got[0], StoredDict)
    assert got[2].attributes is None


class Colour(enum.Enum):
    red = 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_are_records(protocol: int) -> None:
    ident = uuid.uuid4()
    values = [argparse.Namespace(a=1, b=[2]), types.SimpleNamespace(c="d"), signal.SIGTERM, ident]
    namespace, simple, number, ident_ = loads(pickle.dumps(values, protocol))
    assert (namespace.typename, namespace.get("a"), namespace.get("b")) == ("argparse.Namespace", 1, [2])
    assert namespace.get("missing", 7) == 7
    assert "a" in namespace
    assert "missing" not in namespace
    assert simple.attributes == {"c": "d"}
    assert (number.typename, number.value) == ("signal.Signals", 15)
    if protocol >= 2:
        assert loads(pickle.dumps(io.BytesIO(b"abc"), protocol)).state[0] == b"abc"
    assert ident_.get("int") == ident.int
    assert repr(namespace) == "<argparse.Namespace record>"


def test_enum_members_by_name_as_python_3_11_0_pickled_them() -> None:
    name = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    got = loads(make.pickled(b"cbuiltins\ngetattr\n" + name + make.text("weights") + b"\x86R"))
    assert (got.name, got.value) == ("ZeroStageEnum", 3)
    with pytest.raises(UnsafeError, match=r"getattr[\s\S]*ZeroStageEnum, __init__"):
        loads(make.pickled(b"cbuiltins\ngetattr\n" + name + make.text("__init__") + b"\x86R"))


def test_a_bytearray_of_python_3_7() -> None:
    assert loads(make.pickled(make.called("__builtin__", "bytearray", "a\u00e9", "latin-1"))) == bytearray(b"a\xe9")
    with pytest.raises(CorruptError):
        loads(make.pickled(make.called("__builtin__", "bytearray", "a", "utf-8")))


def test_signals_by_name_as_python_3_10_pickled_them() -> None:
    marked = loads(make.pickled(b"csignal\nSIGTERM\n}b"))
    again = loads(make.pickled(b"csignal\nSIGTERM\n"))
    assert (again.typename, again.value, again.state) == ("signal.Signals", 15, None) != (marked.typename, 15, {})


@pytest.mark.parametrize(("module", "name"), [key for key, one in GLOBALS.items() if getattr(one, "members", "")])
def test_every_member_of_an_enum_is_known(module: str, name: str) -> None:
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        assert module.startswith(("megatron.", "transformers.trainer_utils")), "of older or newer ones"
        return
    enum = f"c{module}\n{name}\n".encode()
    for key, member in cls.__members__.items():
        value = loads(make.pickled(b"cbuiltins\ngetattr\n" + enum + make.text(key) + b"\x86R")).value
        assert str(getattr(value, "name", value)) == str(member.value).removeprefix("torch.")


def test_paths_of_python_3_13() -> None:
    got = loads(make.pickled(make.called("pathlib._local", "PosixPath", "/", "a")))
    assert got == pathlib.PurePosixPath("/a")


def test_names_of_classes_are_inert() -> None:
    got = loads(pickle.dumps([int, dict]))
    assert [type(g) for g in got] == [Global, Global]
    assert repr(got[0]) == "<builtins.int>"


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(5, dtype=np.int16),
    np.array([], dtype=np.uint8),
    np.array([[True], [False]]),
    np.array([1, 2], dtype=">u4"),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([b"ab", b"c"]),
    np.array(["äb", "c"]),
    np.array([1, "x", None, [2]], dtype=object),
    np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]).view("V12"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_numpy_arrays(array: np.ndarray, protocol: int) -> None:
    got = loads(pickle.dumps(array, protocol))
    assert isinstance(got, Array)
    assert got.shape == array.shape
    assert as_numpy(got).tolist() == array.tolist()
    assert as_numpy(got).dtype == array.dtype


def test_numpy_arrays_of_numpy_1() -> None:
    data = pickle.dumps(np.arange(3), 2).replace(b"numpy._core", b"numpy.core")
    assert as_numpy(loads(data)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_scalars_and_rng(protocol: int) -> None:
    values = [np.float64(1.5), np.float32(0.1), np.int64(-3), np.uint8(7), np.bool_(True), np.complex128(1j)]
    got = loads(pickle.dumps(values, protocol))
    assert got == [v.item() for v in values]
    assert [type(g) for g in got] == [type(v.item()) for v in values]
    assert as_numpy(loads(pickle.dumps(np.longdouble(2), protocol))) == 2
    kind, keys, position, has_gauss, gauss = np.random.RandomState(3).get_state()
    got = plain(loads(pickle.dumps((kind, keys, position, has_gauss, gauss), protocol)))
    assert got[0] == "MT19937"
    assert (got[1] == keys).all()
    assert got[2:] == (position, has_gauss, gauss)
    generator = loads(pickle.dumps(np.random.default_rng(1), protocol))
    assert isinstance(generator, Record)


def test_dtypes_are_those_of_ckpt() -> None:
    for dtype in dtypes.ALL:
        assert loads(make.pickled(make.stack_global("torch", dtype.name))) is dtype


def test_python_2_text() -> None:
    assert loads(b"\x80\x02U\x03abc.") == "abc"
    assert loads(b"\x80\x02T\x02\0\0\0\xff\xfe.") == b"\xff\xfe"
    assert loads(b"S'abc'\n.") == "abc"


# --- hostile pickles ---


CHILD = r"""
import json, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
sys.path.insert(0, sys.argv[1])
from ckpt.containers.torchfile import read as torchfile, table, unpickle
from ckpt.errors import CkptError
str(CkptError("\x1b"))  # the first error imports a codec
table.allowed()  # what packages register is imported before a pickle is looked at
before = set(sys.modules)
events = []
quiet = False
def hook(event, args):
    if quiet:
        return
    name = event
    if event == "open":
        name = f"open {os.path.basename(str(args[0]))}"
    elif event == "import":
        name = f"import {args[0]}"
    events.append(name)
sys.addaudithook(hook)
out = {}
for file in sorted(os.listdir("files")):
    events.clear()
    start = time.process_time()
    try:
        read = unpickle.load_pickle if file.endswith(".pkl") else torchfile.read
        read(os.path.join("files", file))
        code, text = 0, ""
    except CkptError as error:
        code, text = error.exit_code, str(error)
    except BaseException as error:
        code, text = -1, repr(error)[:300]
    seconds = time.process_time() - start
    quiet = True
    out[file] = [code, seconds, sorted(set(events)), text]
    quiet = False
quiet = True
print(json.dumps({"cases": out, "imported": sorted(set(sys.modules) - before), "canary": os.listdir(".")}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Read every hostile file under an audit hook, in a process with limited memory and time."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "files").mkdir()
    for name, case in make.PICKLES.items():
        (folder / "files" / f"{name}.pkl").write_bytes(case.content)
    for name, case in make.ARCHIVES.items():
        (folder / "files" / f"{name}.pt").write_bytes(case.content)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CASES = {f"{name}.pkl": case.exit_code for name, case in make.PICKLES.items()}
CASES |= {f"{name}.pt": case.exit_code for name, case in make.ARCHIVES.items()}


@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused(name: str, outcome: dict[str, Any]) -> None:
    code, seconds, events, text = outcome["cases"][name]
    assert code == CASES[name], text
    assert seconds < 3
    # The reader opens only the file itself. It doesn't import, compile, run or inspect anything.
    assert set(events) <= {f"open {name}", "builtins.id"}
    assert "\x1b" not in text
    assert len(text) < 2000


def test_nothing_is_imported_or_run(outcome: dict[str, Any]) -> None:
    assert outcome["imported"] == []
    assert outcome["canary"] == ["files"]


def test_the_canary_would_sing(tmp_path: Path) -> None:
    """Python's own unpickler runs the corpus's code, so the test above can fail."""
    (tmp_path / "attack.pkl").write_bytes(make.PICKLES["reduce-os-system"].content)
    code = "import pickle; pickle.load(open('attack.pkl', 'rb'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / make.CANARY).exists()


def test_an_unknown_global_is_named_with_its_file() -> None:
    with pytest.raises(UnsafeError) as error:
        loads(make.PICKLES["stack-global-os-system"].content)
    assert "os.system" in str(error.value)
    assert "nothing was run" in str(error.value)
    assert error.value.path == "test.pkl"
    assert error.value.exit_code == 5


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], tuple[str, ...]]]:
    """Register another package's pickle names."""
    module = types.ModuleType("names_of_tests")
    module.NAMES = names = {("acme.state", "Clock"): (), ("acme.state", "Span"): ("start", "stop")}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(table, "entries", lambda group: {"acme": "names_of_tests:NAMES"})
    table.allowed.cache_clear()
    yield names
    table.allowed.cache_clear()


def test_names_of_another_package_are_records(registered: dict[tuple[str, str], tuple[str, ...]]) -> None:
    span = loads(make.pickled(make.called("acme.state", "Span", "a", "b")))
    assert isinstance(span, Record)
    assert (span.typename, span.get("start"), span.get("stop")) == ("acme.state.Span", "a", "b")
    assert "acme" not in sys.modules
    with pytest.raises(UnsafeError, match=r"acme.state.Clock2"):
        loads(make.pickled(make.called("acme.state", "Clock2")))


@pytest.mark.parametrize("name", [("torch", "Size"), ("builtins", "getattr"), ("argparse", "Namespace")])
def test_no_package_gives_a_name_another_meaning(
    registered: dict[tuple[str, str], tuple[str, ...]], name: tuple[str, str]
) -> None:
    registered[name] = ()
    with pytest.raises(UsageError, match=f"{name[0]}.{name[1]}") as error:
        loads(pickle.dumps(1))
    assert error.value.hint


#: Calls that torch never writes.
NO_TENSORS = {
    "a parameter without a tensor": make.called("torch._utils", "_rebuild_parameter", "data", "True", "hooks"),
    "a device tensor with data in another dtype": make.called(
        "torch._utils", "_rebuild_device_tensor_from_cpu_tensor", "data", "float32", "xla:0", "False"
    ),
}


@pytest.mark.parametrize("what", NO_TENSORS)
def test_a_tensor_made_from_text_is_damage(what: str) -> None:
    with pytest.raises(CorruptError, match=what):
        loads(make.pickled(NO_TENSORS[what]))


def test_damage_is_placed() -> None:
    with pytest.raises(CorruptError) as error:
        loads(b"\x80\x04K\x01\xff.")
    assert error.value.found == "at byte 4 of pickle"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        unpickle.load_pickle(tmp_path / "missing")
    with pytest.raises(NotFoundError):
        unpickle.load_pickle("a\0b")
    with pytest.raises(CorruptError, match="not a regular file"):
        unpickle.load_pickle(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptError, match="not a regular file"):
        unpickle.load_pickle(tmp_path / "pipe")


def test_cycles_through_records_are_let_through() -> None:
    """A device mesh refers to its root, and the root to the meshes made from it."""
    first = argparse.Namespace()
    first.itself = [first]
    got = loads(pickle.dumps(first))
    assert got.get("itself")[0] is got


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH + 1])
def test_depth(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    if depth < MAX_DEPTH:
        assert loads(pickle.dumps(value)) == value
    else:
        with pytest.raises(CorruptError, match="nested"):
            loads(pickle.dumps(value))


# --- random bytes ---


def survives(data: bytes) -> None:
    """Check that reading returns a value that naive code can walk, or raises CkptError."""
    try:
        value = loads(data)
    except CkptError:
        return
    assert len(repr(value)) >= 0


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes(data: bytes) -> None:
    survives(data)
    survives(data + b".")


ALL_OPCODES = [*OPCODES, b"(", b"\x94", b"j", b"h", b"K", b"."]  # some have no handler
OPCODE = st.sampled_from(ALL_OPCODES)
ENTRY = st.sampled_from(sorted(table.GLOBALS)).map(lambda pair: f"c{pair[0]}\n{pair[1]}\n".encode())
VALUE = st.sampled_from(
    [b"N", b"K\x01", b"K\x02", b"]", b"}", b")", b"(", b"\x8a\x09" + b"\x7f" * 9, b"G" + b"\x7f" * 8, b"C\x03abc"]
    + [make.text(t) for t in ("", "latin1", "f8", "<", "O", "storage", "a")]
)


@given(st.lists(st.one_of(OPCODE, ENTRY, ENTRY, VALUE, VALUE, st.sampled_from([b"R", b"b", b"\x81", b"t", b"\x85"]))))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_program(program: list[bytes]) -> None:
    survives(b"".join(program) + b".")


@given(ENTRY, st.lists(VALUE, max_size=8), st.sampled_from([b"R", b"\x81"]), st.lists(VALUE, max_size=6))
@settings(max_examples=400, deadline=None)
def test_any_call(name: bytes, args: list[bytes], call: bytes, state: list[bytes]) -> None:
    survives(name + b"(" + b"".join(args) + b"t" + call + b".")
    survives(name + b"(" + b"".join(args) + b"t" + call + b"(" + b"".join(state) + b"tb.")


def real_pickles() -> list[bytes]:
    state = {
        "plain": {key: value for key, value in PLAIN.items() if not key.startswith("long") and key != "bytes"},
        "args": argparse.Namespace(a=1, path=pathlib.PurePosixPath("/x")),
        "arrays": ARRAYS[:6],
        "rng": (random.Random(1).getstate()[1][:10], np.float64(2)),
    }
    return [pickle.dumps(state, protocol) for protocol in PROTOCOLS]


def test_damaged_pickles() -> None:
    """2,000 pickles have flipped bits, or replaced, missing or repeated bytes."""
    rng = random.Random(0)
    corpus = real_pickles()
    for _ in range(2000):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data))
            kind = rng.randrange(5)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = ord(rng.choice(ALL_OPCODES))
            elif kind == 2:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 3:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            else:
                data[at : at + 4] = struct.pack("<I", rng.choice((0xFFFFFFFF, 0x7FFFFFFF, 1 << 20)))
            if not data:
                break
        survives(bytes(data))


def seen(value: Any, depth: int = 8) -> Any:
    """Return `value` with the contents of its records. Records compare by identity and may form cycles."""
    if depth and isinstance(value, Record):
        return value.typename, *(seen(one, depth - 1) for one in (value.args, value.kwargs, value.state))
    if depth and isinstance(value, dict):
        return [(seen(key, depth - 1), seen(one, depth - 1)) for key, one in value.items()]
    if depth and isinstance(value, tuple | list):
        return type(value), *(seen(one, depth - 1) for one in value)
    if depth and isinstance(value, set | frozenset):  # the order depends on object addresses
        return type(value), *sorted(repr(seen(one, depth - 1)) for one in value)
    return repr(value)


def read(data: bytes) -> Any:
    try:
        return seen(loads(data))
    except CkptError as error:
        return type(error)


def test_opcodes_that_are_done_at_once_do_what_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's metadata has such objects and sizes. The test reads them whole and with every byte replaced."""
    index = pickle.dumps(argparse.Namespace(fqn="w", index=3, offset=pathlib.PurePosixPath("/x")), 4)
    size = b"\x8c\x05torch\x8c\x04Size\x93"
    sizes = [size + b"K\x02K\x03\x86\x94\x85\x94R\x94", size + b"K\x02K\x03K\x04\x87\x94\x85\x94R\x94"]
    whole = [index, *(b"\x80\x04" + one + b"." for one in sizes)]
    whole += [b"\x80\x04(" + sizes[0] + index[11:-1] + b"h\x00h\x01" + sizes[1] + b"t."]
    assert all(machine._OBJECT_WITH_STATE in one or machine._REDUCE_OF_TUPLE in one for one in whole)
    programs = {one[:at] + new + one[at + 1 :] for one in whole for at in range(len(one)) for new in ALL_OPCODES}
    programs |= {one[:at] + one[at + gone :] for one in whole for at in range(len(one)) for gone in (0, 1, 2)}
    found = {program: read(program) for program in programs}
    assert any(isinstance(one, tuple) for one in found.values())
    monkeypatch.setattr(machine, "_OBJECT_WITH_STATE", b"never there")
    monkeypatch.setattr(machine, "_REDUCE_OF_TUPLE", b"never there")
    assert {program: read(program) for program in programs} == found


def test_every_truncation_is_corrupt() -> None:
    for data in real_pickles():
        for end in range(0, len(data), 37):
            with pytest.raises(CorruptError):
                loads(data[:end])


def test_imports_no_framework() -> None:
    names = "{'torch', 'numpy', 'deepspeed'}"
    code = f"import sys; from ckpt.containers.torchfile import read; print(sorted({names} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
