"""PyTorch DCP -> safetensors and -> one torch file, against torch's own converter.

torch's converter writes model and optimizer, like `dcp full`, and does not sync. `dcp hf` writes a third of them.
"""

from __future__ import annotations

from benchmarks.measure import CKPT, PYTHON, Case, call, copy_of, run
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("dcp",)
PEER = "dcp_to_torch_save"


def measure(bench: Bench) -> Table:
    source = bench.source("dcp")
    hf, full, peer = (bench.scratch(name) for name in ("dcp-hf", "dcp-full", "dcp-peer.pt"))
    copy = bench.scratch("dcp-copy")
    to_hf = Case("ckpt convert dcp hf", [*CKPT, "convert", "dcp", "hf", source, "-q", "-o", hf], (hf,))
    to_full = Case("ckpt convert dcp full", [*CKPT, "convert", "dcp", "full", source, "-q", "-o", full], (full,))
    theirs = [PYTHON, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", source, peer]
    run(to_hf)  # the copies need files
    run(to_full)
    measured = bench.rounds(
        [
            copy_of("cp of hf", hf, copy),
            to_hf,
            Case(PEER, theirs, (peer, copy)),
            copy_of("cp of full", full, copy),
            to_full,
        ]
    )
    return Table(
        f"DCP written by torch, 8 ranks, {num_params(bench.num_layers) / 1e6:.0f} M parameters with Adam's states",
        measured,
        [
            Goal(to_hf.name, "cp of hf", at_most=1.25),
            Goal(to_full.name, "cp of full", at_most=1.5),
            Goal(to_full.name, PEER),
        ],
        [
            f"{call('benchmarks.equal', 'dcp-hf', hf, peer)} tensors of hf and "
            f"{call('benchmarks.equal', 'dcp-full', full, peer)} of full are those that {PEER} wrote"
        ],
    )
