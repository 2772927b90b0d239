"""What stands in a run's folder beside the tensors: step folders, config, tokenizer, and what is left out.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.stores`.
"""
