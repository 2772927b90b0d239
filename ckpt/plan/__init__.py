"""What a checkpoint is, what a target needs, and the proof that the one makes the other: pure, no file is opened."""
