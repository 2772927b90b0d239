"""Bitwise comparison of two checkpoints, digests of one, and manifests.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`.
"""
