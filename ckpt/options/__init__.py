"""Shared code for commands: declaration, options, completion and printing.

May import: `ckpt.api`, `ckpt.base`, `ckpt.plan`, `ckpt.runs`.
"""
