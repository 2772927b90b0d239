"""`ckpt doctor`: facts about installation and machine, and the commands that work on a checkpoint."""
