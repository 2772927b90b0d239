"""The only code that moves tensor bytes: it opens files, reads ranges, casts, writes, stages and commits.

It knows no format.

May import: `ckpt.base`, `ckpt.plan`, `ckpt.processes`.
"""
