"""What works beside any training: saved checkpoints are looked after; ranks, nodes and losses are watched.

`callback` checks, converts and pushes each checkpoint of a run of HF Trainer. `heartbeat` and `watch` name the rank
that died or stalled, `spikes` finds the loss that jumped, and `watched` brings both to HF Trainer. `preflight` looks
over the nodes before a run, and `plot` draws the losses after it.

May import: `ckpt`, `ckpt.base`.
"""
