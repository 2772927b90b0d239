"""What a checkpoint is, which formats there are, what a target needs, and the proof that the one makes the other.

Pure: no file is opened, and torch is not imported.

May import: `ckpt.base`.
"""
