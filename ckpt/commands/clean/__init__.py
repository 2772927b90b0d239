"""`ckpt clean`: what may be deleted next to a run."""
