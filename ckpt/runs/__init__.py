"""Run folders: step folders, files next to the tensors, and omitted content.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.stores`.
"""
