"""`ckpt formats`: readable and writable formats."""
