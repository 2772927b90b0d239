"""`ckpt plot`: loss curves of runs in one picture."""
