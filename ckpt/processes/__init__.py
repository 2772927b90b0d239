"""Several processes of one command: how they were started, and how they talk.

May import: `ckpt.base`.
"""
