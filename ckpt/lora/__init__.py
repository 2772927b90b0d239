"""LoRA adapters: found, combined and merged with the bits of PEFT's own arithmetic.

Imports all of ckpt below `cli`; torch where the arithmetic is.
"""
