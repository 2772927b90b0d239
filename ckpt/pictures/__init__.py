"""Pictures and pages: rectangles, texts and colours as SVG, and pages of one file.

May import: `ckpt.base`.
"""
