"""The formats, in four families that do not know each other, and the names and quantizations that they share.

A family imports the core, `names` and `quantized`; never another family, never `ckpt.cli`, `ckpt.api` or the mover.
"""
