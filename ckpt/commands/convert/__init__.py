"""`ckpt convert`: a checkpoint in another format."""
