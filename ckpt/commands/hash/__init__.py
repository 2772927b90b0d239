"""`ckpt hash`: digests of a checkpoint, independent of its format."""
