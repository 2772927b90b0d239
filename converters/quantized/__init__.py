"""Weights stored quantized, in several tensors each.

They are carried unchanged, bit for bit. `converters.quantized.dequantize` replaces them with plain weights, with the
bits computed by the library that reads them.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`.
"""
