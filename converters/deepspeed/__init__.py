"""DeepSpeed: ZeRO stages 1 to 3, universal checkpoints, and pipelines (Megatron-DeepSpeed, GPT-NeoX)."""
