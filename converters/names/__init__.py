"""Relations between the tensor names and layouts that frameworks use for one model.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`, `converters.quantized`.
"""
