"""`ckpt check`: whether a checkpoint, or each of those in a run folder, is whole.

May import: `ckpt.api`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`,
`ckpt.stores`, `ckpt.verify`.
"""
