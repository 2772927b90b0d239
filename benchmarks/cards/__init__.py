"""Verification cards: released models moved through every format with random bits, and the page of each journey.

Only `source` imports torch; it runs in processes of its own. The runner stays small, because a command's
peak memory starts at the runner's size.
"""
