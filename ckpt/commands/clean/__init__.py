"""`ckpt clean`: removal of ckpt's leftovers next to a run."""
