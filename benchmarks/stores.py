"""`ckpt` from an S3 server on the loopback, against its own library and s3fs.

The libraries read all bytes in equal ranges with equal concurrency. `convert` is also compared with obstore writing
them. Only the transfer has a goal: Python's start and opening the checkpoint dominate these short processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.measure import CKPT, PYTHON, Case, call, remove, run
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table, verdict
from benchmarks.store_server import BUCKET

SOURCES = ("hf",)
OUTPUT = Path("/dev/shm/ckpt-benchmarks-stores")
SHARE = 0.8  # relative to the bare library's throughput
#: ckpt's tasks, with the library's most similar task.
_ALIKE = {"hash": "obstore", "convert": "obstore writes"}


def measure(bench: Bench) -> Table:
    source = bench.source("hf")
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    with serving(source.parent):
        url = f"s3://{BUCKET}/{source.name}"
        peers = [name for name in ("obstore", "s3fs") if importlib.util.find_spec(name)]
        to_read = [PYTHON, "-m", "benchmarks.store_peer"]
        cases = [
            *(Case(name, [*to_read, name, source.name, OUTPUT], (OUTPUT,)) for name in [*peers, "obstore writes"]),
            Case("ckpt hash", [*CKPT, "hash", url, "-q"]),
            Case(
                "ckpt convert hf hf",
                [*CKPT, "convert", "hf", "hf", url, "-q", "--no-manifest", "-o", OUTPUT],
                (OUTPUT,),
            ),
        ]
        measured = bench.rounds(cases)
        notes = _transfers(bench, source.name, size)
        run(cases[-1])
        same = call("benchmarks.equal", "safetensors", source, OUTPUT)
        remove([OUTPUT])
        notes.append(f"{same} tensors that were fetched are those of the files that the server has")
    goals = [Goal("ckpt hash", "obstore"), Goal("ckpt convert hf hf", "obstore writes")]
    title = f"From S3 on the loopback, {num_params(bench.num_layers) / 1e6:.0f} M parameters in one file"
    missing = [] if "s3fs" in peers else ["s3fs is not installed"]
    return Table(title, measured, goals, [*notes, *missing], peak_mb=700)


def _transfers(bench: Bench, prefix: str, size: int) -> list[str]:
    seconds = timed_transfers(bench, prefix, [name for pair in _ALIKE.items() for name in reversed(pair)])
    remove([OUTPUT])
    lines = [f"the transfer alone, {name}: {size / median(found) / 1e6:.0f} MB/s" for name, found in seconds.items()]
    for ours, theirs in _ALIKE.items():
        share = throughput(seconds, ours, theirs)
        lines.append(f"  {ours} at {share:.2f} x the throughput of {theirs} {verdict(share >= SHARE, f'>= {SHARE}')}")
    share = throughput(seconds, "convert", "obstore")
    lines.append(f"  convert, which writes, at {share:.2f} x the throughput of obstore, which drops what it reads")
    return lines


def timed_transfers(bench: Bench, prefix: str, names: Sequence[str]) -> dict[str, list[float]]:
    """Return each round's seconds from the first to the last range."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(bench.num_rounds):
        for name, found in seconds.items():
            found.append(float(call("benchmarks.store_peer", name, prefix, OUTPUT)))
    return seconds


def throughput(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> float:
    """Return the throughput of `ours`, relative to `theirs`."""
    return median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    command = [PYTHON, "-m", "benchmarks.store_server", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        os.environ.update(keys, AWS_ENDPOINT_URL=endpoint)
        try:
            yield
        finally:
            server.terminate()
