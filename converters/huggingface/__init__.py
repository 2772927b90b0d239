"""Hugging Face folders (`hf`) and PEFT adapters (`peft`), both safetensors.

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`,
`converters.names`, `converters.quantized`.
"""
