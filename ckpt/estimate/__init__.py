"""The memory that training a model takes, from its config alone.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.show`, `ckpt.state`.
"""
