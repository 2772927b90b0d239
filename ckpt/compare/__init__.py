"""Two checkpoints compared bit by bit, digests of one, and the manifest of what was written.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`.
"""
