"""Relations between the names, and layouts, that different frameworks give the tensors of one model.

transformers is asked where it is installed.

May import: `ckpt.base`, `ckpt.estimate`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`.
"""
