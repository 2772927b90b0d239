"""Several processes of one command: how they were started, how they talk, and which does what.

May import: `ckpt.base`.
"""
