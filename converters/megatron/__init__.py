"""Megatron-LM: `mp_rank_*` folders (`megatron`) and distributed checkpoints (`megatron-dist`)."""
