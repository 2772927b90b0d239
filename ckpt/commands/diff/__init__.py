"""`ckpt diff`: changes between two checkpoints."""
