"""Reading a checkpoint without converting it: single tensors, a target's files, a mount, torch's `dcp.load`.

May import: `ckpt.base`, `ckpt.compare`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`.
"""
