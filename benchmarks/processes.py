"""One conversion on several processes: bf16 weights of ZeRO-3 masters, in memory, which takes processors alone.

A process that works together with others imports torch, which takes it a second or two; so this is a larger model,
whose masters are zeros that take no memory.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, PYTHON, Case, call, remove, rounds
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()
FOLDER = Path("/dev/shm/ckpt-benchmarks")
TIMES = 7  # as many layers as the other sections have
ONE, ONE_CORE, TWO = "ckpt, 1 process", "ckpt, 1 process on 1 core", "ckpt, 2 processes"


def measure(bench: Bench) -> Table:
    layers = bench.num_layers * TIMES
    source, one, two = (FOLDER / name for name in ("source", "one", "two"))
    convert = ["convert", "zero3", "hf", source, "--dtype", "bf16", "-q", "-o"]
    try:
        call("benchmarks.zero_source", source, layers, "sparse")
        together = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.05"]
        measured = rounds(
            [
                Case(ONE, [*CKPT, *convert, one], (one,)),
                Case(ONE_CORE, ["taskset", "-c", "0", *CKPT, *convert, one], (one,)),
                Case(TWO, [*together, "-m", "ckpt", *convert, two], (two,)),
            ],
            bench.num_rounds,
        )
        same = call("benchmarks.equal", "safetensors", one, two)
    finally:
        remove([FOLDER])
    return Table(
        f"ZeRO-3 masters, 8 ranks, {num_params(layers) / 1e6:.0f} M parameters -> hf --dtype bf16, in /dev/shm",
        measured,
        [Goal(TWO, ONE_CORE, at_least=1.6), Goal(TWO, ONE)],
        [f"{same} tensors are the same from one process and from two"],
    )
