"""Relations between the names, and layouts, that different frameworks give the tensors of one model.

transformers is asked where it is installed.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`.
"""
