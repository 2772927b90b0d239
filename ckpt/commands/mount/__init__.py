"""`ckpt mount`: a checkpoint as a folder of another format."""
