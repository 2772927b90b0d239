"""`ckpt preflight`: comparison of a job's nodes before training."""
