"""`ckpt verify`: are two checkpoints the same?"""
