"""`ckpt doctor`: facts about installation and machine, and usable commands for a checkpoint."""
