"""Relations between the tensor names and layouts that frameworks use for one model.

The installed transformers provides them for models without a table.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`,
`converters.quantized`.
"""
