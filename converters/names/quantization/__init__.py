"""Tensors that store a quantized weight: their names, dtypes and shapes, by quantization method."""
