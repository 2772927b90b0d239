"""What PEFT's files say of an adapter: its config, its names, the rules of each release.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""
