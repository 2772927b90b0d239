"""Tensors that a quantized weight is stored in: their names, dtypes and shapes, by quantization method."""
