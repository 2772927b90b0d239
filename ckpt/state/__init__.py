"""What a training state means whatever the format: an optimizer's states, a schedule, an adapter's names.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.plan`.
"""
