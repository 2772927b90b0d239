"""PEFT's files: adapter configs, tensor names, and each release's rules.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""
