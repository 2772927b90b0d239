"""What the bundled trainer does beside training: its log, trackers, spikes, and the records of checkpoints.

What works beside any trainer is in `ckpt/training`.
"""
