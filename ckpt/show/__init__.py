"""A checkpoint for people: the overview of `ckpt inspect`, and the picture of who holds what."""
