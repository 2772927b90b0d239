"""`ckpt check`: whether a checkpoint, or each of those in a run folder, is whole."""
