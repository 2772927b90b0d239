"""One conversion on several processes: ZeRO-3 masters -> bf16 weights in memory, so only processors matter.

Each cooperating process takes half a second to start, so the model is large: 8 billion zero parameters that take no
memory. One process already uses all processors with threads. So two processes are compared with one on one processor,
and with one copying thread.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, PYTHON, Case, call, remove, run
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()
FOLDER = Path("/dev/shm/ckpt-benchmarks")
TIMES = 21  # times the other sections' layers
CHECKED_LAYERS = 1  # layers for comparing one process with two
ONE, ONE_CORE, ONE_WORKER = "ckpt, 1 process", "ckpt, 1 process on 1 core", "ckpt, 1 process, --workers 1"
TWO, TWO_WORKERS = "ckpt, 2 processes", "ckpt, 2 processes, --workers 1 each"
TORCHRUN = "ckpt, 2 processes by torchrun"

ON_ONE_CORE = ("taskset", "-c", "0", *CKPT)
BY_TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.05")
_AS_MPIRUN = """
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2
OMPI_COMM_WORLD_RANK=1 "$@" & OMPI_COMM_WORLD_RANK=0 "$@" && wait $!
"""


def measure(bench: Bench) -> Table:
    layers = bench.num_layers * TIMES
    source, random, out, other = (FOLDER / name for name in ("source", "random", "out", "other"))
    two = ["sh", "-c", _AS_MPIRUN, "sh", *CKPT]
    try:
        call("benchmarks.zero_source", source, layers, "zeros")
        measured = bench.rounds(
            [
                Case(name, [*start, *converted(source, out), *options], (out,))
                for name, start, options in (
                    (ONE, CKPT, []),
                    (ONE_CORE, ON_ONE_CORE, []),
                    (TWO, two, []),
                    (TORCHRUN, [*BY_TORCHRUN, "-m", "ckpt"], []),
                    (ONE_WORKER, CKPT, ["--workers", "1"]),
                    (TWO_WORKERS, two, ["--workers", "1"]),
                )
            ]
        )
        remove([source, out])
        call("benchmarks.zero_source", random, CHECKED_LAYERS)
        run(Case(ONE, [*CKPT, *converted(random, out)]))
        run(Case(TWO, [*two, *converted(random, other)]))
        same = call("benchmarks.equal", "safetensors", out, other)
    finally:
        remove([FOLDER])
    return Table(
        f"ZeRO-3 masters, 8 ranks, {num_params(layers) / 1e6:.0f} M parameters -> hf --dtype bf16, in /dev/shm",
        measured,
        [
            Goal(TWO, ONE_CORE, at_least=1.6),
            Goal(TWO, ONE),
            Goal(TORCHRUN, ONE_CORE, at_least=1.6),
            Goal(TWO_WORKERS, ONE_WORKER),
        ],
        [f"{same} tensors of a smaller model with random masters are the same from one process and from two"],
    )


def converted(source: Path, output: Path) -> list[str | Path]:
    return ["convert", "zero3", "hf", source, "--dtype", "bf16", "-q", "-o", output]
