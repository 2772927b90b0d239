"""`ckpt resume`: the folder to go on from, on the processes and the engine that there are now."""
