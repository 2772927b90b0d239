"""Two checkpoints compared bit by bit, digests of one, and the manifest of what was written."""
