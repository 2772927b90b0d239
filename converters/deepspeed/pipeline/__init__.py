"""Pipelines under DeepSpeed: `layer_*` files of Megatron-DeepSpeed and GPT-NeoX, 3D parallel."""
