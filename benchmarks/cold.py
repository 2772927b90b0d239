"""ZeRO-3 -> safetensors from a disk that nothing of it has been read from, against `cp` of the output from there.

Every byte is read from the disk: what the page cache has of the inputs is dropped before each run.  The model is four
times as large as in the other sections: a disk does a fifth of their work in the 0.2 s that ckpt takes to start.
"""

from __future__ import annotations

from benchmarks.measure import CKPT, Case, call, copy_of, run
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()
TIMES = 4  # as many layers as the other sections have


def measure(bench: Bench) -> Table:
    layers = bench.num_layers * TIMES
    source, output, kept, copy = map(bench.scratch, ("cold-source", "cold", "cold-kept", "cold-copy"))
    call("benchmarks.zero_source", source, layers, "masters")
    run(Case("first", [*CKPT, "convert", "zero3", "hf", source, "-q", "-o", kept], (kept,)))
    name = "ckpt convert zero3 hf"
    measured = bench.rounds(
        [
            copy_of("cp of the output", kept, copy, cold=(kept,)),
            Case(name, [*CKPT, "convert", "zero3", "hf", source, "-q", "-o", output], (output,), cold=(source,)),
        ]
    )
    size = 4 * num_params(layers) / 1e9
    title = f"ZeRO-3, 8 ranks -> hf from a cold disk, {size:.1f} GB"
    return Table(title, measured, [Goal(name, "cp of the output", at_most=1.0)])
