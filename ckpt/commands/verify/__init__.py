"""`ckpt verify`: bit-for-bit comparison of two checkpoints, or of a folder with its manifest."""
