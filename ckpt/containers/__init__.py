"""Containers shared by several formats: torch's zip and pickle, safetensors, PyTorch DCP.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""
