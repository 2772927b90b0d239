"""Containers shared by several formats: torch's zip and pickle, safetensors, PyTorch DCP.

They read and write bytes, and know no model, optimizer or framework.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""
