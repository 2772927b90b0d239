"""Coverage-guided fuzzing for readers: `python -m tests.faults.fuzz [--seconds N] [TARGET...]`, with atheris.

A reader returns or raises a ckpt error, within bounds; `test_fuzz.py` needs no atheris.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.support.places import FIXTURES

_MEMORY = Path("/dev/shm")
#: Limits for one input: seconds, and process memory in megabytes.
_TIMEOUT, _RSS = 10, 2000
_LARGEST = 1 << 16


def _extents(value: object, depth: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each tensor in a torch file."""
    from ckpt.containers.torchfile.values import StoredTensor

    if isinstance(value, StoredTensor):
        if value.extent.numel:
            yield value.extent.offset, value.extent.end
    elif depth < 8 and isinstance(value, dict):
        for inner in value.values():
            yield from _extents(inner, depth + 1)
    elif depth < 8 and isinstance(value, list | tuple):
        for inner in value:
            yield from _extents(inner, depth + 1)


def pickles(data: bytes, place: Path) -> None:
    """Load a pickle, walk its content and print it."""
    from ckpt.containers.torchfile.unpickle import loads

    assert len(repr(loads(data, path="fuzz"))) >= 0


def archives(data: bytes, place: Path) -> None:
    """Read a torch file: its records and tensors must lie within it."""
    from ckpt.containers.torchfile import read as torchfile

    path = place / "fuzz.pt"
    path.write_bytes(data)
    found = torchfile.read(path)
    ranges = [(record.offset, record.offset + record.size) for record in found.records.values()]
    for start, stop in [*ranges, *_extents(found.root)]:
        assert 0 <= start <= stop <= len(data), (start, stop)


def pickles_in_archives(data: bytes, place: Path) -> None:
    """Load a pickle in an archive with correct checksums."""
    from tests.support.hostile import make

    archives(make.archive(make.records(data)), place)


def safetensors(data: bytes, place: Path) -> None:
    """Read a safetensors file: its tensors must fill it, and the library must agree."""
    from safetensors import SafetensorError, deserialize

    from ckpt.containers.safetensors import read_header

    path = place / "fuzz.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    at = 8 + int.from_bytes(data[:8], "little")
    for one in sorted(header.entries, key=lambda entry: (entry.start, entry.stop)):
        assert one.start == at, one
        at = one.stop
    assert at == len(data)
    try:
        theirs = dict(deserialize(data))
    except SafetensorError as error:
        raise AssertionError(f"the library refuses it: {error}") from error
    assert theirs.keys() == {one.name for one in header.entries}
    for one in header.entries:
        assert bytes(theirs[one.name]["data"]) == data[one.start : one.stop], one


def metadata(data: bytes, place: Path) -> None:
    """Read DCP's `.metadata`: chunks must lie in their tensors, or the plan refuses them; files lie in the folder."""
    from ckpt.containers.dcp.metadata import read_metadata
    from ckpt.errors import CorruptError
    from ckpt.plan.checkpoint import WEIGHT
    from ckpt.plan.planner import check_source
    from ckpt.plan.tensors import Extent, Fragment, Pieces, Tensor

    (place / ".metadata").write_bytes(data)
    found = read_metadata(place)
    for entry in found.entries.values():
        parts = [Fragment(box, Extent.contiguous("fuzz", 0, entry.dtype, box.sizes)) for box in entry.chunks]
        is_inside = all(stop <= size for box in entry.chunks for stop, size in zip(box.ends, entry.shape, strict=True))
        try:
            check_source(Tensor(entry.key, WEIGHT, entry.dtype, entry.shape, Pieces(tuple(parts))))
        except CorruptError:
            continue
        assert is_inside, entry
    for one in found.places.paths:
        assert Path(one).resolve().is_relative_to(place.resolve()), one


def indexes(data: bytes, place: Path) -> None:
    """Read `model.safetensors.index.json`, which names files in its folder."""
    from ckpt.containers.weights import parse_index
    from ckpt.move.json_files import read_json

    path = place / "model.safetensors.index.json"
    path.write_bytes(data)
    for name in parse_index(read_json(path), path).weight_map.values():
        assert (place / name).resolve().is_relative_to(place.resolve()), name


def _fixtures(*patterns: str, largest: int = _LARGEST) -> list[bytes]:
    files = [path for pattern in patterns for path in sorted(FIXTURES.glob(pattern))]
    return [path.read_bytes() for path in files if path.stat().st_size <= largest]


def _hostile(kind: str) -> list[bytes]:
    from tests.support.hostile import make

    return [case.content for case in getattr(make, kind).values() if len(case.content) <= _LARGEST]


def _inner(contents: list[bytes]) -> list[bytes]:
    """Return the pickles in torch archives."""
    from tests.faults.kinds import pickles_in

    return [content[part.start : part.stop] for content in contents for part in pickles_in(content)]


def _safetensors_seeds() -> list[bytes]:
    made = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "pt"}}
    odd = {"é\\": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "b": {"dtype": "F8_E4M3", "shape": []}}
    odd["b"]["data_offsets"] = [1, 2]
    texts = [(json.dumps(one).encode(), size) for one, size in ((made, 12), (odd, 2), ({}, 0))]
    return [struct.pack("<Q", len(text)) + text + bytes(size) for text, size in texts]


_TORCH = ("*/global_step*/*.pt", "verl-*/*/*/*.pt", "quantized-full/*.pt", "trainer-*/*/*.pt")
#: Fuzz targets and their seeds.
TARGETS: dict[str, tuple[Callable[[bytes, Path], None], Callable[[], list[bytes]]]] = {
    "pickles": (pickles, lambda: _hostile("PICKLES") + _fixtures("*/step-2/.metadata") + _inner(_fixtures(*_TORCH))),
    "archives": (archives, lambda: _hostile("ARCHIVES") + _fixtures(*_TORCH)),
    "pickles-in-archives": (pickles_in_archives, lambda: _hostile("PICKLES") + _inner(_fixtures(*_TORCH))),
    "safetensors": (safetensors, lambda: _safetensors_seeds() + _fixtures("*/*/*.safetensors")),
    # small seeds: an instrumented megabyte takes seconds
    "metadata": (metadata, lambda: _fixtures("*/step-2/.metadata", "quantized-dcp/*/.metadata", largest=1 << 13)),
    "indexes": (indexes, lambda: [b'{"metadata": {"total_size": 4}, "weight_map": {"a": "model-1.safetensors"}}']),
}


def is_refused(target: str, data: bytes, place: Path) -> bool:
    """Return True if the reader refuses `data` with an error of ckpt. Raise any other error."""
    from ckpt.errors import CkptError

    try:
        TARGETS[target][0](data, place)
    except CkptError:
        return True
    return False


def _fuzz(target: str, seconds: int, seed: int, place: Path) -> None:
    """Fuzz one target for `seconds` and end this process, with a nonzero status after a finding."""
    import atheris

    with atheris.instrument_imports(include=["ckpt"]):
        import ckpt.containers.dcp.metadata
        import ckpt.containers.safetensors
        import ckpt.containers.torchfile.read
        import ckpt.containers.torchfile.unpickle
        import ckpt.containers.weights  # noqa: F401
    corpus = place / "corpus"
    corpus.mkdir()
    for number, content in enumerate(TARGETS[target][1]()):
        (corpus / str(number)).write_bytes(content)
    options = {"max_total_time": seconds, "timeout": _TIMEOUT, "rss_limit_mb": _RSS, "max_len": _LARGEST, "seed": seed}
    options |= {"print_final_stats": 1, "verbosity": 1, "artifact_prefix": f"{tempfile.gettempdir()}/fuzz-{target}-"}
    arguments = [f"-{name}={value}" for name, value in options.items()]

    def once(data: bytes) -> None:
        is_refused(target, data, place)

    atheris.Setup([sys.argv[0], *arguments, str(corpus)], once)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all without")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    targets = given.targets or list(TARGETS)
    if given.here:
        _fuzz(targets[0], given.seconds, given.seed, given.here)
    failed = []
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None) as place:
            again = [sys.executable, "-m", "tests.faults.fuzz", target, "--here", place, "--seed", str(given.seed)]
            run = partial(subprocess.run, [*again, "--seconds", str(max(1, given.seconds // len(targets)))], text=True)
            ended = run(stderr=subprocess.PIPE, check=False)
        facts = [line for line in ended.stderr.splitlines() if line.startswith(("stat::number_of_exec", "Done "))]
        print(target, "found something:" if ended.returncode else "found nothing:", *facts, flush=True)
        if ended.returncode:
            failed.append(target)
            print(ended.stderr[-6000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
