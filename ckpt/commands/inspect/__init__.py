"""`ckpt inspect`: a checkpoint for people, as an overview and as a picture of who holds what."""
