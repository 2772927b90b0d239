"""PyTorch's own: DCP (FSDP1, FSDP2), one torch file (`full`), files of one rank each (`fsdp-ranks`).

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`, `converters.names`,
`converters.optimizers`, `converters.quantized`.
"""
