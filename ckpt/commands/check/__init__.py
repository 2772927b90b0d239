"""`ckpt check`: completeness of a checkpoint, or of every checkpoint in a run folder."""
