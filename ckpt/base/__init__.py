"""Foundations for every other room: errors, text, sizes, streams, entry points, the version, progress bars.

May import: nothing of ckpt.
"""
