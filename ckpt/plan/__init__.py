"""Checkpoints, formats, targets, and plans with a proof that a target can be made from a checkpoint.

Pure: no file is opened, and torch is not imported.

May import: `ckpt.base`.
"""
