"""The engines that the trainer drives: native PyTorch (DDP, FSDP1, FSDP2), DeepSpeed ZeRO, DeepSpeed pipelines."""
