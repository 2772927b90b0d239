"""`ckpt` from an S3 server on the loopback, beside the library that it reads with, and beside s3fs.

The libraries read all bytes in ranges of the same size, as many at a time, and drop them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import CKPT, PYTHON, Case
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table
from benchmarks.store_server import BUCKET

SOURCES = ("hf",)
_OUTPUT = Path("/dev/shm/ckpt-benchmarks-stores")


def measure(bench: Bench) -> Table:
    source = bench.source("hf")
    with _serving(source.parent):
        url = f"s3://{BUCKET}/{source.name}"
        peers = [name for name in ("obstore", "s3fs") if importlib.util.find_spec(name)]
        cases = [
            *(Case(name, [PYTHON, "-m", "benchmarks.store_peer", name, source.name]) for name in peers),
            Case("ckpt hash", [*CKPT, "hash", url, "-q"]),
            Case(
                "ckpt convert hf hf",
                [*CKPT, "convert", "hf", "hf", url, "-q", "--no-manifest", "-o", _OUTPUT],
                (_OUTPUT,),
            ),
        ]
        measured = bench.rounds(cases)
    goals = [Goal(name, "obstore", at_most=1.25) for name in ("ckpt hash", "ckpt convert hf hf")]
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    title = f"From S3 on the loopback, {num_params(bench.num_layers) / 1e6:.0f} M parameters, {size / 1e6:.0f} MB"
    missing = [] if "s3fs" in peers else ["s3fs is not installed"]
    return Table(title, measured, goals, missing, peak_mb=700)


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[None]:
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
