"""`ckpt hash`: digests of a checkpoint, whatever its format."""
