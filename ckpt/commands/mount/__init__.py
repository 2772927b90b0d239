"""`ckpt mount`: view of a checkpoint as a folder in another format."""
