"""`ckpt convert`: conversion of a checkpoint to another format."""
