"""A checkpoint that is read without being converted: single tensors, a target's files, a mount, torch's `dcp.load`.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`,
`ckpt.state`, `ckpt.verify`.
"""
