"""The containers that formats share, as bytes: torch's zip and pickle, safetensors, PyTorch DCP.

No model, no optimizer and no framework is known here.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""
