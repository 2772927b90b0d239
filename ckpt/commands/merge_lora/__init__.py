"""LoRA adapters: found, combined and merged with the bits of PEFT's own arithmetic.

torch is imported where the arithmetic is.
"""
