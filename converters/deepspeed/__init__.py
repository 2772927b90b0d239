"""DeepSpeed: ZeRO stages 0 to 3 with MoE, AutoEP and AutoTP, universal checkpoints, and pipelines (GPT-NeoX too).

May import: `ckpt.adapters`, `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`,
`converters.names`, `converters.optimizers`, `converters.quantized`.
"""
