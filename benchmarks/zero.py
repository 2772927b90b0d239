"""ZeRO-3 -> safetensors and verification, against DeepSpeed's own script."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, PYTHON, Case, call, copy_of, parallel_copy_of, run, written_to_disk
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("zero3",)
PEER = "zero_to_fp32.py"


def measure(bench: Bench, *, large: bool = False) -> Table:
    source = bench.source("zero3")
    fp32, bf16, peer = (bench.scratch(name) for name in ("zero-fp32", "zero-bf16", "zero-peer"))
    copy, other = bench.scratch("zero-copy"), bench.scratch("zero-other")
    convert = [*CKPT, "convert", "zero3", "hf", source, "-q", "-o"]
    run(Case("first", [*convert, fp32], (fp32,)))  # the copies need files
    run(copy_of("copy", fp32, other))
    measured = bench.rounds(
        [
            copy_of("cp of the output", fp32, copy),
            parallel_copy_of("a copy of it by all processors", fp32, copy),
            written_to_disk("dd of as many bytes", 4 * num_params(bench.num_layers), copy),
            Case("ckpt convert zero3 hf", [*convert, fp32], (fp32,)),
            Case("ckpt convert zero3 hf --dtype bf16", [*convert, bf16, "--dtype", "bf16"], (bf16,)),
            by_peer(source, peer),
            Case("cmp", ["cmp", fp32 / "model.safetensors", other / "model.safetensors"]),
            Case("ckpt verify zero3 against hf", [*CKPT, "verify", source, fp32, "-q"]),
        ]
    )
    notes = [f"{call('benchmarks.equal', 'safetensors', fp32, peer)} tensors are those that {PEER} wrote"]
    if large:
        notes += _large(bench)
    return Table(
        f"ZeRO-3, 8 ranks, {num_params(bench.num_layers) / 1e6:.0f} M parameters -> hf",
        measured,
        [
            Goal("ckpt convert zero3 hf", "cp of the output", at_most=1.25),
            Goal("ckpt convert zero3 hf", PEER, at_least=5),
            Goal("ckpt convert zero3 hf --dtype bf16", PEER, at_least=3),
            Goal("ckpt verify zero3 against hf", "cmp", at_most=3),
        ],
        notes,
        peak_mb=400,
    )


def by_peer(source: Path, output: Path, name: str = PEER) -> Case:
    return Case(name, [PYTHON, "-m", "deepspeed.utils.zero_to_fp32", source, output, "--safe_serialization"], (output,))


def _large(bench: Bench) -> list[str]:
    bench.clear()
    num_layers = bench.num_layers * 3 + 14
    source, output = bench.source("zero3", num_layers), bench.scratch("zero-large")
    found = []
    for name, extra in (("fp32", ()), ("bf16", ("--dtype", "bf16"))):
        one = run(Case(name, [*CKPT, "convert", "zero3", "hf", source, "-q", "-o", output, *extra], (output,)))
        found.append(f"{num_params(num_layers) / 1e6:.0f} M parameters, {name}, run once: peak {one.peak_mb:.0f} MB")
    return found
