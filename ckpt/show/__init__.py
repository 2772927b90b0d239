"""A checkpoint for people: the overview of `ckpt inspect`, the picture of who holds what, and what a plan will write.

May import: `ckpt.base`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`.
"""
