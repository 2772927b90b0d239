"""Helpers for any training: they look after saved checkpoints and watch ranks, nodes and losses.

May import: `ckpt`, `ckpt.base`.
"""
