"""Shared code for commands: declaration, options, completion, printing, pictures and pages.

May import: `ckpt.api`, `ckpt.base`, `ckpt.move`, `ckpt.pictures`, `ckpt.plan`, `ckpt.runs`.
"""
