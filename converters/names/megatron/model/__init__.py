"""What all formats of Megatron's models share: how a parallel GPTModel is cut, numbered and named.

Pure: no I/O.  Names are those of `ckpt.plan.checkpoint.MEGATRON`: megatron-core's own, with layers numbered over the
whole model, one tensor per expert under its number in the whole model, and norms under the names that Transformer
Engine's fused layers give them (`self_attention.linear_qkv.layer_norm_weight`), whichever layers the model was built
from.

* `axes.Grid`: sizes of the parallel axes, and which ranks there are.
* `axes.Stages`: which layers a pipeline rank's model chunks hold.
* `splits.split_of`, `splits.rank_boxes`: which part of a tensor a (expert) tensor parallel rank holds.
* `spelling.Spelling`: the names in one chunk of a model on one rank, and back.
* `spelling.in_order`: parameters in the order in which the modules register them, which is an optimizer's order.

Format facts: megatron-core 0.16.1 (transformer/transformer_block.py `get_num_layers_to_build`, transformer_layer.py
`get_transformer_layer_offset`, pipeline_parallel_layer_layout.py, tensor_parallel/layers.py, transformer/attention.py,
multi_latent_attention.py, mlp.py, moe/experts.py, moe/router.py, multi_token_prediction.py, models/gpt/gpt_model.py,
models/gpt/gpt_layer_specs.py), Megatron-LM of August 2026 (training/arguments.py, training/checkpointing.py).
"""
