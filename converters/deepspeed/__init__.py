"""DeepSpeed: ZeRO stages 0 to 3 with MoE, AutoEP and AutoTP, universal checkpoints, and pipelines (GPT-NeoX too).

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.run_folder`, `ckpt.state`,
`converters.names`, `converters.optimizers`, `converters.quantized`.
"""
