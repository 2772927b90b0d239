"""ZeRO-3 -> safetensors from a cold disk, against `cp` of the output from the same disk.

A virtual machine's host may still cache the inputs. The smaller size mostly shows ckpt's 0.2 s start.
"""

from __future__ import annotations

from benchmarks.measure import CKPT, Case, call, copy_of, parallel_copy_of, run, written_to_disk
from benchmarks.models import STEP, num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()
SIZES = {1: None, 4: 1.0}  # times the other sections' layers, each with its goal


def measure(bench: Bench) -> Table:
    cases, goals, notes = [], [], []
    for times, goal in SIZES.items():
        layers = bench.num_layers * times
        num_bytes = 4 * num_params(layers)
        size = f"{num_bytes / 1e9:.1f} GB"
        source, output, kept, copy = (bench.scratch(f"cold-{n}-{times}") for n in ("source", "out", "kept", "copy"))
        call("benchmarks.zero_source", source, layers, "masters")
        convert = [*CKPT, "convert", "zero3", "hf", source, "-q", "-o"]
        run(Case("first", [*convert, kept], (kept,)))
        ours, cp = f"ckpt convert zero3 hf, {size}", f"cp of the output, {size}"
        cases += [
            copy_of(cp, kept, copy, cold=(kept,)),
            parallel_copy_of(f"a copy of it by all processors, {size}", kept, copy, cold=(kept,)),
            Case(f"cat of the output, {size}", ["sh", "-c", 'cat "$0"/* >/dev/null', kept], cold=(kept,)),
            written_to_disk(f"dd of as many bytes, {size}", num_bytes, copy),
            Case(ours, [*convert, output], (output,), cold=(source,)),
        ]
        goals.append(Goal(ours, cp, at_most=goal))
        same = call("benchmarks.equal", "zero3-hf", kept, source / f"global_step{STEP}")
        notes.append(f"{size}: {same} tensors are the masters, put together by DeepSpeed's rule")
    return Table("ZeRO-3, 8 ranks -> hf from a cold disk", bench.rounds(cases), goals, notes)
