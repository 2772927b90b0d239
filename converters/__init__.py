"""The formats, in four families that do not know each other, and the rooms that they share.

These are `names`, `quantized` and `optimizers`.  A family imports them and the core; never another family, never
`ckpt.cli`, `ckpt.api` or the mover.
"""
