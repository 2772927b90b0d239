"""State dicts of torch's optimizers from any framework, and the optimizer states read from them.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.plan`, `ckpt.state`, `converters.quantized`.
"""
