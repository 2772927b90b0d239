"""Foundations for every other room.

May import: nothing of ckpt.
"""
