"""ZeRO-3 with 8 billion parameters -> bf16 safetensors, against `cp` of the output, from and to a cold disk.

Adam's states are not read, so they are holes. ckpt reads twice as much as `cp`. The disk does not fit source, output
and copy: each round writes the source again and removes it before `cp`.
"""

from __future__ import annotations

import shutil

from benchmarks.measure import CKPT, Case, Measured, Run, call, copy_of, remove, run, written_to_disk
from benchmarks.models import STEP, num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()
TIMES = 21  # 8 billion parameters


def measure(bench: Bench) -> Table:
    layers = bench.num_layers * TIMES
    size = num_params(layers)
    source, output, copy = (bench.scratch(f"disk-{name}") for name in ("source", "output", "copy"))
    convert = [*CKPT, "convert", "zero3", "hf", source, "--dtype", "bf16", "-q", "-o", output]
    ours = Case("ckpt convert zero3 hf --dtype bf16", convert, (output,), cold=(source,))
    others = [
        copy_of("cp of the output", output, copy, cold=(output,)),
        Case("cat of the output", ["sh", "-c", 'cat "$0"/* >/dev/null', output], cold=(output,)),
        written_to_disk("dd of as many bytes", 2 * size, copy),
    ]
    runs: dict[str, list[Run]] = {case.name: [] for case in (ours, *others)}
    notes: list[str] = []

    def of_the_source() -> None:
        remove([source, output])
        if (free := shutil.disk_usage(bench.folder).free) < 6.2 * size:
            raise SystemExit(f"{bench.folder} has {free / 1e9:.0f} GB free, and {6.2 * size / 1e9:.0f} GB are needed")
        call("benchmarks.zero_source", source, layers, "masters")
        runs[ours.name].append(run(ours))
        if not notes:
            same = call("benchmarks.equal", "zero3-bf16", output, source / f"global_step{STEP}")
            notes.append(f"{same} tensors are the masters, put together by DeepSpeed's rule and rounded by torch")
        remove([source])

    def of_the_output() -> None:
        for case in others:
            runs[case.name].append(run(case))
            remove([copy])

    bench.folder.mkdir(parents=True, exist_ok=True)
    for done in range(bench.num_rounds):  # a round's output stays for the next `cp`
        for step in (of_the_output, of_the_source) if done % 2 else (of_the_source, of_the_output):
            step()
    return Table(
        f"ZeRO-3, 8 ranks, {size / 1e6:.0f} M parameters -> hf in bf16, {2 * size / 1e9:.1f} GB, from a cold disk",
        {case.name: Measured(case, tuple(runs[case.name])) for case in (*others, ours)},
        [Goal(ours.name, "cp of the output", at_most=1.0)],
        notes,
    )
