"""ZeRO-3 -> universal checkpoint, against DeepSpeed's own script, which does not sync."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import CKPT, PYTHON, Case, call, copy_of, run
from benchmarks.models import STEP, num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("zero3",)
PEER = "ds_to_universal.py"
STEP_FOLDER = f"global_step{STEP}"
UNIVERSAL = f"{STEP_FOLDER}_universal"


def measure(bench: Bench) -> Table:
    source = bench.source("zero3")
    output, copy, peer = (bench.scratch(name) for name in ("universal", "universal-copy", "universal-peer"))
    convert = Case(
        "ckpt convert zero3 universal", [*CKPT, "convert", "zero3", "universal", source, "-q", "-o", output], (output,)
    )
    run(convert)  # the copies need files
    measured = bench.rounds(
        [
            copy_of("cp -r of the output", output, copy),
            convert,
            by_peer(source, peer, (copy,)),
        ]
    )
    same = call("benchmarks.equal", "universal", output / UNIVERSAL, peer / UNIVERSAL)
    return Table(
        f"ZeRO-3, 8 ranks -> universal, {num_params(bench.num_layers) / 1e6:.0f} M parameters with Adam's states",
        measured,
        [Goal(convert.name, "cp -r of the output", at_most=1.1), Goal(convert.name, PEER, at_least=10)],
        [f"{same} tensors are those that {PEER} wrote"],
    )


def by_peer(source: Path, output: Path, removed: tuple[Path, ...]) -> Case:
    """Convert by DeepSpeed. Its temporary files need the space of `removed`."""
    folders = ["--input_folder", source / STEP_FOLDER, "--output_folder", output / UNIVERSAL]
    return Case(PEER, [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", *folders], (output, *removed))
