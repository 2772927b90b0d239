"""What every other room uses: errors, words for people, sizes, streams, entry points, the version, progress bars.

May import: nothing of ckpt.
"""
