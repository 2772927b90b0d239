"""The Hugging Face Hub: folders pushed, models fetched, model cards.

May import: `ckpt.api`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.stores`, `ckpt.verify`.
"""
