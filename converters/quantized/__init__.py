"""Weights stored quantized, in several tensors each.

They are carried unchanged, bit for bit. `converters.quantized.dequantize` replaces them with plain weights, with the
same bits as computed by the library that reads them. `methods` has one module per method.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`.
"""
