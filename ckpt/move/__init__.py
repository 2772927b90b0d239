"""The only code that moves tensor bytes: it lists, opens, reads ranges, casts, writes, stages, commits.

It knows no format.

May import: `ckpt.base`, `ckpt.plan`, `ckpt.processes`.
"""
