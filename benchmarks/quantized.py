"""`ckpt convert --quantize` against `cp` of the plain model."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

from benchmarks.measure import CKPT, Case, copy_of
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("hf",)
METHODS = {"fp8-block": "hf", "mxfp4": "hf", "q8_0": "gguf"}
_TOKENIZER = Path(__file__).parents[1] / "fixtures" / "gguf" / "llama" / "tokenizer.json"
AT_MOST, AT_MOST_MB = 1.6, 250
TIMES = 4  # as many layers as elsewhere, so that the start counts for little


def measure(bench: Bench) -> Table:
    layers = TIMES * bench.num_layers
    source = bench.source("hf", layers)
    copyfile(_TOKENIZER, source / _TOKENIZER.name)  # GGUF holds the tokenizer
    copy = copy_of("cp -r of the plain model", source, bench.scratch("quantized-copy"))
    cases = [_case(bench, method, to, source) for method, to in METHODS.items()]
    return Table(
        f"bf16 -> quantized weights, {num_params(layers) / 1e9:.1f} billion parameters",
        bench.rounds([copy, *cases]),
        [Goal(case.name, copy.name, at_most=AT_MOST) for case in cases],
        peak_mb=AT_MOST_MB,
    )


def _case(bench: Bench, method: str, to: str, source: Path) -> Case:
    output = bench.scratch(f"quantized-{method}")
    command = [*CKPT, "convert", "hf", to, source, "-q", "-o", output, "--quantize", method]
    return Case(f"ckpt convert --quantize {method}", command, (output,))
