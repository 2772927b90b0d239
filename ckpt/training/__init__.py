"""What a run of HF Trainer does with each of its checkpoints, beside the training.

May import: `ckpt`, `ckpt.base`.
"""
