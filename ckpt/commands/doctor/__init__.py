"""`ckpt doctor`: what this installation and this machine have, and what works on a checkpoint."""
