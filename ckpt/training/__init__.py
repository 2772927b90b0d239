"""Helpers for any training: they look after saved checkpoints and watch ranks, nodes and losses.

`callback` checks, converts and pushes each checkpoint of an HF Trainer run. `heartbeat` and `ckpt watch` name a rank
that died or stalled. `spikes` finds loss spikes. `watched` adds both to HF Trainer. `ckpt preflight` checks the nodes
before a run, and `ckpt plot` draws the losses after it.

May import: `ckpt`, `ckpt.base`.
"""
