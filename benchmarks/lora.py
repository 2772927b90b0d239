"""LoRA merge into the base, against transformers and PEFT, which don't sync."""

from __future__ import annotations

from benchmarks.measure import CKPT, PYTHON, Case, call, copy_of
from benchmarks.models import LORA_RANK, num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("lora",)
#: So importing torch is noise beside 3 GB weights.
TIMES = 4
PEER = "PEFT, save_pretrained"


def measure(bench: Bench) -> Table:
    num_layers = TIMES * bench.num_layers
    source = bench.source("lora", num_layers)
    base, adapter = source / "base", source / "adapter"
    output, copy, peer = (bench.scratch(name) for name in ("merged", "lora-copy", "lora-peer"))
    merge = Case("ckpt merge-lora", [*CKPT, "merge-lora", adapter, "--base", base, "-q", "-o", output], (output,))
    measured = bench.rounds(
        [
            copy_of("cp -r of the base", base, copy),
            merge,
            Case(PEER, [PYTHON, "-m", "benchmarks.lora_peer", base, adapter, peer], (peer,)),
        ]
    )
    same = call("benchmarks.equal", "safetensors", output, peer)
    return Table(
        f"LoRA of rank {LORA_RANK} into {num_params(num_layers) / 1e9:.1f} billion parameters in bf16",
        measured,
        [Goal(merge.name, "cp -r of the base", at_most=1.6), Goal(merge.name, PEER, at_least=3)],
        [f"{same} tensors are those that PEFT's merge saves"],
    )
