"""Megatron with TP 2 and PP 2 <-> safetensors, and the plan for a model with DeepSeek-V3's size.

The Megatron source was written by ckpt.
"""

from __future__ import annotations

from benchmarks.deepseek_v3 import PIPELINE
from benchmarks.measure import CKPT, Case, call, copy_of, run, warm
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table, verdict

SOURCES = ("hf",)
PLAN_SECONDS, PLAN_MB = 15, 2000  # of processor time


def measure(bench: Bench) -> Table:
    source = bench.source("hf")
    shards, model = bench.scratch("megatron-shards"), bench.scratch("megatron-hf")
    output, copy = bench.scratch("megatron-output"), bench.scratch("megatron-copy")
    split = [*CKPT, "convert", "hf", "megatron", source, "--tp", "2", "--pp", "2", "-q", "-o"]
    to_megatron = Case("ckpt convert hf megatron", [*split, output], (output,))
    join = [*CKPT, "convert", "megatron", "hf", shards, "--config", source, "-q", "-o", model]
    to_hf = Case("ckpt convert megatron hf", join, (model,))
    run(Case("first", [*split, shards], (shards,)))
    warm(shards)
    run(to_hf)  # the copies need files
    measured = bench.rounds(
        [
            copy_of("cp of hf", model, copy),
            to_hf,
            copy_of("cp -r of megatron", shards, copy),
            to_megatron,
        ]
    )
    same = call("benchmarks.equal", "safetensors", source, model)
    bench.clear()
    return Table(
        f"Megatron, TP 2 and PP 2, {num_params(bench.num_layers) / 1e6:.0f} M parameters in bf16",
        measured,
        [Goal(to_hf.name, "cp of hf", at_most=1.5), Goal(to_megatron.name, "cp -r of megatron", at_most=1.5)],
        [f"{same} tensors are the same there and back", _plan(bench)],
    )


def _plan(bench: Bench) -> str:
    source = bench.scratch("megatron-plan")
    made = call("benchmarks.deepseek_v3", source)
    layout = ["--tp", "8", "--pp", "16", "--ep", "8", "--pipeline-model-parallel-layout", PIPELINE]
    command = [*CKPT, "convert", "hf", "megatron", source, *layout, "--dry-run", "-q"]
    one = run(Case("plan", command))
    reached = verdict(
        one.cpu_seconds <= PLAN_SECONDS and one.peak_mb <= PLAN_MB, f"<= {PLAN_SECONDS} s of cpu, {PLAN_MB} MB"
    )
    figures = f"{one.seconds:.1f} s, {one.cpu_seconds:.1f} s of cpu, peak {one.peak_mb:.0f} MB {reached}"
    return f"plan of DeepSeek-V3 ({made}) -> TP 8, PP 16, EP 8, run once: {figures}"
