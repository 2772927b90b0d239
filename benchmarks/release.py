"""gpt-oss-20b's layers at real sizes: `--dequantize`, and back with `--quantize mxfp4 --like` the original.

The plain values are compared with transformers', and the new parts with the original's.
"""

from __future__ import annotations

from benchmarks.measure import CKPT, Case, call
from benchmarks.runner import Bench, Table

SOURCES = ("gpt-oss",)
NUM_LAYERS = 2


def measure(bench: Bench) -> Table:
    source = bench.source("gpt-oss", NUM_LAYERS)
    plain, again = bench.scratch("release-plain"), bench.scratch("release-again")
    convert = [*CKPT, "convert", "hf", "hf"]
    like = [*convert, plain, "-q", "-o", again, "--quantize", "mxfp4", "--like", source]
    measured = bench.rounds(
        [
            Case("ckpt convert --dequantize", [*convert, source, "-q", "-o", plain, "--dequantize"], (plain,)),
            Case("ckpt convert --quantize mxfp4 --like", like, (again,)),
        ]
    )
    notes = [
        f"{call('benchmarks.equal', 'mxfp4-plain', plain, source)} plain tensors have transformers' bits",
        f"{call('benchmarks.equal', 'safetensors', again, source)} tensors have the original's bytes",
    ]
    return Table(f"{NUM_LAYERS} layers of gpt-oss-20b in MXFP4, with random bits", measured, (), notes)
