"""The formats, in four families that do not know each other, and the rooms that they share.

A family imports these rooms (`names`, `quantized`, `optimizers`) and the core; never another family, never `ckpt.cli`,
`ckpt.api` or the mover.
"""
