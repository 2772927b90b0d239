"""LoRA adapters: found, combined and merged with the bits of PEFT's own arithmetic.

torch is imported where the arithmetic is.

May import: `ckpt.api`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`,
`ckpt.stores`, `ckpt.views`.
"""
