"""`ckpt inspect`: overview of a checkpoint, and a picture of its ranks' shares."""
