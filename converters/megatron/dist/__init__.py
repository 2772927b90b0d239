"""Megatron-core's distributed checkpoints: `torch_dist`, `torch_dcp` and Megatron-FSDP's `fsdp_dtensor`."""
