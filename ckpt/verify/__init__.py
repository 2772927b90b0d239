"""Two checkpoints compared bit by bit, digests of one, and the manifest of what was written.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`.
"""
