"""Trainer on megatron-core, on GPUs or CPUs."""
