"""Meaning of a training state in any format: optimizer states, schedules, adapter names.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.plan`.
"""
