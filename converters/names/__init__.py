"""Relations between the names (and layouts) that different frameworks give the same model's tensors.

Imports `ckpt.plan` and `ckpt.state`; transformers where it is installed.
"""
