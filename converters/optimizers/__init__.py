"""State dicts of torch's optimizers, whoever saved them, and the states that are read from them.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.plan`, `ckpt.state`, `converters.quantized`.
"""
