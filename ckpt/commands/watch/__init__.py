"""`ckpt watch`: the rank of a run that died or stalled."""
