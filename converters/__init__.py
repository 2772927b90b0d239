"""One module per checkpoint format; each imports the core of `ckpt` and no other's reader or writer."""
