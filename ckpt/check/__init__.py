"""`ckpt check`: whether a checkpoint, or each of those in a run folder, is whole.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.show`, `ckpt.stores`,
`ckpt.verify`.
"""
