"""Several processes running one command: launch and communication.

May import: `ckpt.base`.
"""
