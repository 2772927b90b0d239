"""`dcp.load` into FSDP2 on 4 ranks: from ZeRO-3 with `ckpt.StorageReader`, from DCP with torch's reader.

Importing torch would hide the difference, so this section does not time whole processes.
"""

from __future__ import annotations

import json

from benchmarks.measure import call
from benchmarks.models import num_params
from benchmarks.runner import Bench, Goal, verdict

SOURCES = ("zero3", "dcp")
NUM_RANKS = 4


def measure(bench: Bench) -> str:
    sources = [bench.source(kind) for kind in SOURCES]
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", NUM_RANKS, "-m", "benchmarks.load_peer")
    found = json.loads(call(*launch, *sources, bench.num_layers, bench.num_rounds))
    share = found["bytes_read"] / found["bytes_held"]
    ratio = Goal("ckpt", "torch's", at_most=1.5).said(found["ratios"])
    return "\n".join(
        [
            f"dcp.load on {NUM_RANKS} ranks, {num_params(bench.num_layers) / 1e6:.0f} M parameters with Adam's states",
            f"{'from DCP (8 ranks), by torch':<42}{found['dcp']:>8.2f} s",
            f"{'from ZeRO-3 (8 ranks), ckpt.StorageReader':<42}{found['ckpt']:>8.2f} s  {ratio}; "
            f"each rank reads {share:.4f} x the bytes of its shards "
            f"{verdict(share <= 1.1, '<= 1.1')}; peak {found['peak_mb']:.0f} MB, no goal: "
            f"it includes shards of {found['bytes_held'] / 1e6:.0f} MB, torch's reader and the check",
            "what ckpt loaded is, on every rank, what ZeRO-3's files hold, put together by DeepSpeed's rule",
        ]
    )
