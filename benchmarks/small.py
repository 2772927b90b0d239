"""safetensors -> safetensors with 18,867 small tensors, against few large ones with as many bytes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, Case, call, copy_of, run, warm
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("hf",)
LAYERS = 50  # as many bytes in few tensors


def measure(bench: Bench) -> Table:
    few, many = sources(bench)
    outputs = bench.scratch("small-few"), bench.scratch("small-many")
    copy = bench.scratch("small-copy")
    cases = [
        converted(f"ckpt convert hf hf, {name}", source, output)
        for name, source, output in (("few", few, outputs[0]), ("18,867", many, outputs[1]))
    ]
    for case in cases:
        run(case)  # gives the comparison its files
    same = [call("benchmarks.equal", "safetensors", *pair) for pair in ((few, outputs[0]), (many, outputs[1]))]
    measured = bench.rounds([copy_of("cp -r of the small ones", many, copy), *cases])
    return Table(
        "18,867 tensors of a mixture of experts and few large ones, 1.5 GB each, hf -> hf",
        measured,
        [Goal(cases[1].name, cases[0].name, at_most=1.2), Goal(cases[0].name, "cp -r of the small ones")],
        [f"{same[0]} and {same[1]} tensors are those of the source"],
    )


def sources(bench: Bench) -> tuple[Path, Path]:
    """Write few large tensors, and 18,867 small ones."""
    few, many = bench.source("hf", LAYERS), bench.scratch("small-source")
    call("benchmarks.moe_source", many, "30b")
    warm(many)
    return few, many


def converted(name: str, source: Path, output: Path) -> Case:
    return Case(name, [*CKPT, "convert", "hf", "hf", source, "-q", "-o", output], (output,))
