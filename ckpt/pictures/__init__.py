"""Pictures in SVG, and self-contained HTML pages.

May import: `ckpt.base`.
"""
