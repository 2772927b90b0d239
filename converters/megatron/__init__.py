"""Megatron-LM: `mp_rank_*` folders (`megatron`) and distributed checkpoints (`megatron-dist`).

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `ckpt.state`, `converters.names`,
`converters.optimizers`.
"""
