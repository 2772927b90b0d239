"""Movement of tensor bytes: list, open, read ranges, cast, write, stage, commit.

No other code moves tensor bytes, and this code knows no format.

May import: `ckpt.base`, `ckpt.plan`, `ckpt.processes`.
"""
