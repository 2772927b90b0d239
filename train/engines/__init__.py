"""Trainer's engines: native PyTorch (DDP, FSDP1, FSDP2), DeepSpeed ZeRO and DeepSpeed pipelines."""
