"""Shared parts of all formats with Megatron's models: sharding, numbering and names of a parallel GPTModel.

Names follow `ckpt.plan.checkpoint.MEGATRON`: megatron-core's own, with layers and experts numbered over the whole model
and one tensor per expert. Norms always have the names from Transformer Engine's fused layers
(`self_attention.linear_qkv.layer_norm_weight`).

Format facts: megatron-core 0.16.1 (transformer/transformer_block.py `get_num_layers_to_build`, transformer_layer.py
`get_transformer_layer_offset`, pipeline_parallel_layer_layout.py, tensor_parallel/layers.py, transformer/attention.py,
multi_latent_attention.py, mlp.py, moe/experts.py, moe/router.py, multi_token_prediction.py, models/gpt/gpt_model.py,
models/gpt/gpt_layer_specs.py), Megatron-LM, August 2026 (training/arguments.py, training/checkpointing.py).
"""
