"""`ckpt convert --quantize` against `cp` of the plain model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, Case, copy_of
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("hf",)
METHODS = ("fp8-block", "mxfp4")
AT_MOST, AT_MOST_MB = 1.6, 250


def measure(bench: Bench) -> Table:
    source = bench.source("hf")
    copy = copy_of("cp -r of the plain model", source, bench.scratch("quantized-copy"))
    cases = [_case(bench, method, source) for method in METHODS]
    return Table(
        f"bf16 -> quantized weights, {num_params(bench.num_layers) / 1e6:.0f} M parameters",
        bench.rounds([copy, *cases]),
        [Goal(case.name, copy.name, at_most=AT_MOST) for case in cases],
        peak_mb=AT_MOST_MB,
    )


def _case(bench: Bench, method: str, source: Path) -> Case:
    output = bench.scratch(f"quantized-{method}")
    command = [*CKPT, "convert", "hf", "hf", source, "-q", "-o", output, "--quantize", method]
    return Case(f"ckpt convert --quantize {method}", command, (output,))
