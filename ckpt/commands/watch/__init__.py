"""`ckpt watch`: search for a rank that died or stalled."""
