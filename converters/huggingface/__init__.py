"""Hugging Face folders (`hf`) and PEFT adapters (`peft`), both safetensors.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`,
`converters.names`, `converters.quantized`.
"""
