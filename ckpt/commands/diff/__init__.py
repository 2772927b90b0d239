"""`ckpt diff`: what changed between two checkpoints."""
