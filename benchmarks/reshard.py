"""ZeRO-3 on 8 ranks -> ZeRO-3 on 6 ranks, the whole training state."""

from __future__ import annotations

from benchmarks.measure import CKPT, Case, call, copy_of, parallel_copy_of
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("zero3",)


def measure(bench: Bench) -> Table:
    source = bench.source("zero3")
    output, copy = bench.scratch("reshard-6"), bench.scratch("reshard-copy")
    command = [*CKPT, "convert", "zero3", "zero3", source, "-q", "--world-size", "6", "-o", output]
    convert = Case("ckpt convert zero3 zero3 --world-size 6", command, (output,))
    measured = bench.rounds(
        [
            copy_of("cp -r of the checkpoint", source, copy),
            parallel_copy_of("a copy of it by all processors", source, copy),
            convert,
        ]
    )
    same = call("benchmarks.equal", "zero3", output / "global_step100", source / "global_step100")
    return Table(
        f"ZeRO-3, 8 ranks -> 6 ranks, {num_params(bench.num_layers) / 1e6:.0f} M parameters with Adam's states",
        measured,
        [Goal(convert.name, "cp -r of the checkpoint", at_most=1.2)],
        [f"{same} tensors (masters, states, steps), put together by DeepSpeed's rule, are those of the source"],
    )
