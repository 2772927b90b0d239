"""DeepSpeed pipelines: `layer_*` files from Megatron-DeepSpeed and GPT-NeoX, 3D parallel."""
