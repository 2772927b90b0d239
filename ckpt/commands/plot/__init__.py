"""`ckpt plot`: the losses of runs over each other."""
