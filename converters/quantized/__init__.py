"""Weights that are stored quantized, in several tensors each.

They are carried like any other tensors, bit for bit; `converters.quantized.dequantize` puts plain weights in their
place, with the bits that the library computes that reads them.  A module for each method says how it stores them.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `converters.names`.
"""
