"""Values in `config.json` known to be accepted by transformers, so its model need not be built to test them.

Other values may be legal, too: then the installed transformers decides (`converters.names.hub.save_pretrained`).

Source: transformers 5.23 (`configuration_*.py`, `activations.py`, `modeling_rope_utils.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

INT, FLOAT, BOOL, NULL, INTS, FLOATS = "int", "float", "bool", "null", "ints", "floats"
_NAMES: Mapping[tuple[str, ...], str] = {
    (INT,): """
        alibi_bias_max attn_pdrop block_size bos_token_id chunk_size chunk_size_feed_forward
        d_model decoder_sparse_step depth embed_dim expand expansion_ratio first_k_dense_replace floor_scale
        head_dim hidden_size image_end_token_id image_seq_length image_start_token_id image_token_id
        image_token_index in_channels interleave_moe_layer_step intermediate_size intermediate_size_mlp
        kv_lora_rank linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim mamba_head_dim mamba_num_heads max_position_embeddings max_seq_len
        max_window_layers mlp_ratio moe_intermediate_size moe_num_experts moe_num_shared_experts
        moe_shared_expert_intermediate_size moe_topk n_ctx n_embd n_group n_groups n_head n_heads n_layer
        n_layers n_positions n_routed_experts n_shared_experts no_rope_layer_interval num_attention_heads
        num_channels num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
        num_layers num_local_experts num_logits_to_keep num_mtp_layers num_nextn_predict_layers
        num_position_embeddings num_shared_experts original_max_position_embeddings out_hidden_size
        pretraining_tp projection_dim qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar rotary_dim
        shared_expert_intermediate_size sliding_window spatial_merge_size ssm_state_size state_size
        time_step_rank tokens_per_second topk_group type_vocab_size v_head_dim video_end_token_id
        video_start_token_id video_token_id video_token_index vision_end_token_id vision_start_token_id
        vocab_size window_size
        classifier_proj_size d_ff d_kv decoder_attention_heads decoder_ffn_dim decoder_layers
        decoder_start_token_id dim embedding_size encoder_attention_heads encoder_ffn_dim encoder_layers
        hidden_dim local_attention mask_feature_length mask_feature_min_masks mask_time_length
        mask_time_min_masks max_relative_positions max_source_positions max_target_positions
        median_filter_width num_mel_bins relative_attention_max_distance relative_attention_num_buckets
        pooler_hidden_size position_buckets sparse_pred_ignore_index
    """,
    (BOOL,): """
        apply_spec_augment classifier_bias decoder_bias deterministic_flash_attn legacy norm_bias
        position_biased_input relative_attention share_encoder_decoder_embeddings sinusoidal_pos_embds
        is_gated_act scale_decoder_outputs sparse_prediction use_weighted_layer_sum
        add_cross_attention alibi apply_residual_connection_post_layernorm attention_bias attention_out_bias
        attention_softmax_in_fp32 attn_temperature_tuning attn_uses_sequence_id enable_moe_fp32_combine
        is_decoder is_encoder_decoder learned_pos_emb lm_head_bias mamba_proj_bias mlp_bias
        moe_shared_expert_overlap multi_query multimodal_projector_bias no_bias norm_topk_prob
        output_router_logits prefix_lm qk_layernorm qk_ln qkv_bias reorder_and_upcast_attn
        rescale_prenorm_residual residual_in_fp32 rope_interleave scale_attention_softmax_in_fp32
        scale_attn_by_inverse_layer_idx scale_attn_weights scale_embedding slow_but_exact
        summary_proj_to_labels summary_use_proj tie_word_embeddings use_absolute_position_embeddings
        use_associative_scan use_bias use_cache use_conv_bias use_mamba_kernels use_mambapy use_mask_token
        use_mean_pooling use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window vision_use_head
    """,
    (FLOAT, INT): """
        activation_dropout attention_multiplier attention_probs_dropout_prob classifier_dropout emb_pdrop
        embd_pdrop embed_dropout embedding_dropout embedding_multiplier full_attn_alpha_factor
        full_attn_beta_factor hidden_dropout hidden_dropout_prob layerdrop linear_attn_alpha_factor
        linear_attn_beta_factor logits_scaling mlp_alpha_factor mlp_beta_factor projection_dropout
        resid_dropout resid_pdrop residual_dropout residual_multiplier summary_first_dropout dropout
        dropout_rate mask_feature_prob mask_time_prob mlp_dropout pooler_dropout qa_dropout
        seq_classif_dropout summary_last_dropout
    """,
    (FLOAT,): """
        attention_dropout attn_scale downsample_ratio embedding_fraction initializer_factor
        initializer_range input_jitter_noise layer_norm_eps layer_norm_epsilon layer_scale_init_value
        logit_scale norm_eps norm_epsilon rms_norm_eps routed_scaling_factor router_aux_loss_coef
        router_jitter_noise router_scaling_factor swiglu_alpha swiglu_limit time_step_floor time_step_max
        time_step_min time_step_scale decoder_layerdrop encoder_layerdrop init_std initializer_cutoff_factor
    """,
    (INT, NULL): """
        attention_chunk_size boi_token_index eoi_token_index mm_tokens_per_image moe_k moe_latent_size
        moe_layer_end_index moe_layer_interval moe_layer_start_index n_inner pad_token_id q_lora_rank
        sliding_window_pattern cls_token_id decoder_vocab_size num_decoder_layers sep_token_id
    """,
    (FLOAT, NULL): """
        attn_logit_softcapping clip_qkv embedding_initializer_range final_logit_softcapping moe_norm_min
        softmax_scale
    """,
    (NULL,): """
        attention_types attn_config image_grid_pinpoints summary_activation topk_method pos_att_type
        problem_type suppress_tokens
    """,
    (INTS, INT): """
        image_size patch_size temporal_patch_size vision_feature_layer
    """,
    (BOOL, NULL): """
        output_hidden_states return_dict use_bidirectional_attention
    """,
    (INTS, NULL): """
        begin_suppress_tokens mlp_only_layers moe_layers no_rope_layers
    """,
    (INTS,): """
        deepstack_visual_indexes fullatt_block_indexes
    """,
    (INTS, INT, NULL): """
        eos_token_id
    """,
    (INT, INTS, NULL): """
        forced_eos_token_id
    """,
    (FLOATS,): """
        time_step_limit
    """,
}
#: Value types by entry.
TYPES: Mapping[str, tuple[str, ...]] = {name: types for types, names in _NAMES.items() for name in names.split()}
ACTIVATIONS = frozenset(
    (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu"),
        *("quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
        *("xielu",),
    )
)
LAYER_TYPES = frozenset(
    (
        *("full_attention", "sliding_attention", "chunked_attention", "window_attention"),
        *("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        *("minimax_m3_sparse", "conv", "moe", "hybrid", "hybrid_sliding", "reference_sliding_attention"),
        *("linear_attention", "sparse", "dense"),
    )
)
#: Required numbers by type of rotary embedding.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_ACTIVATION = (
    *("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "projector_hidden_act"),
    *("activation", "classifier_activation", "dense_act_fn", "pooler_hidden_act"),
)
#: Known words by entry.
WORDS: Mapping[str, tuple[str, ...]] = {
    "classifier_pooling": ("cls", "mean"),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
    "norm_rel_ebd": ("none", "layer_norm"),
    "position_embedding_type": ("absolute",),
    "summary_type": ("first", "last", "mean"),
}
#: Negative values that stand for a default.
_NEGATIVE = {"max_relative_positions": -1, "position_buckets": -1, "sparse_pred_ignore_index": -100}
_DTYPES = ("float32", "bfloat16", "float16")
#: Entries that may be null, and the architectures that forbid it.
NULL_EXCEPT: Mapping[str, tuple[str, ...]] = {
    "bos_token_id": ("cwm",),
    "classifier_dropout": ("gpt_neo", "gpt_neox", "modernbert", "mt5", "t5"),
    "summary_activation": ("electra",),
    "sliding_window": ("cwm", "exaone_moe", "flint"),
}
#: Sizes that are lists in these model types, with a number for each layer.
LISTED = {"conv_kernel": ("hubert", "wav2vec2"), "num_heads": ("swin",)}
#: Only recorded by transformers, or compared elsewhere.
_RECORDS = ("architectures", "model_type", "transformers_version", "_name_or_path", "quantization_config")
#: Only recorded for these model types.
RECORDS_OF = {"deepseek_v3": ("ep_size", "moe_layer_freq", "scoring_func", "topk_method")}
_PARTS = ("text_config", "vision_config")
#: Numbers in older releases.
_OLD_NUMBERS = ("rope_theta", "pretraining_tp", "max_window_layers")
_HEADS = (
    *(("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("num_attention_heads", "num_key_value_heads")),
    *(("d_model", "encoder_attention_heads"), ("d_model", "decoder_attention_heads"), ("dim", "n_heads")),
)


def unknown_values(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key in _PARTS and isinstance(value, Mapping):
            yield from (f"{key}.{one}" for one in unknown_values(value))
        elif not _is_known(key, value, config):
            yield key
    for whole, part in _HEADS:
        sizes = config.get(whole), config.get(part)
        if all(type(size) is int for size in sizes) and (not sizes[1] or sizes[0] % sizes[1]):
            yield part


def _is_known(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    if key in _RECORDS or key in RECORDS_OF.get(str(config.get("model_type")), ()):
        return True
    if key in _ACTIVATION:
        return isinstance(value, str) and value in ACTIVATIONS
    if key in WORDS:
        return value in WORDS[key]
    if key in _NEGATIVE and value == _NEGATIVE[key]:
        return True
    if key == "summary_activation" and value is not None:
        return isinstance(value, str) and value in ACTIVATIONS
    if key in ("dtype", "torch_dtype"):
        return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _DTYPES)
    if key in ("rope_parameters", "rope_scaling"):
        return value is None or (isinstance(value, Mapping) and _is_rope(value))
    if key in LISTED:
        return _type_of(value) == (INTS if config.get("model_type") in LISTED[key] else INT)
    if key == "layer_types":
        is_list = isinstance(value, list) and len(value) == config.get("num_hidden_layers")
        return value is None or (is_list and all(isinstance(one, str) and one in LAYER_TYPES for one in value))
    if value is None and key in NULL_EXCEPT:
        return config.get("model_type") not in NULL_EXCEPT[key]
    if value == []:
        return INTS in TYPES.get(key, ())
    if key == "pad_token_id" and value is not None:
        rows = config.get("vocab_size")
        return type(value) is int and type(rows) is int and 0 <= value < rows
    if key in _OLD_NUMBERS:
        return type(value) in (int, float)
    if "dropout" in key or key.endswith("pdrop"):
        return key in TYPES and _type_of(value) in TYPES[key] and value is not None and 0 <= value <= 1
    return key in TYPES and _type_of(value) in TYPES[key]


def _is_rope(value: Mapping[str, Any]) -> bool:
    """Accept one rotary embedding's parameters, or one per layer type."""
    if value and all(isinstance(one, Mapping) for one in value.values()):
        return all(key in LAYER_TYPES and _is_rope(one) for key, one in value.items())
    name = value.get("rope_type", value.get("type", "default"))
    flags = {"rope_type", "type", *(key for key, one in value.items() if _is_rope_flag(key, one))}
    numbers = {key: one for key, one in value.items() if key not in flags}
    is_known = isinstance(name, str) and name in ROPE_TYPES and all(key in numbers for key in ROPE_TYPES[name])
    return is_known and all(type(one) in (int, float) and one > 0 for one in numbers.values())


def _is_rope_flag(key: str, value: Any) -> bool:
    if key == "mrope_section":
        return _type_of(value) == INTS
    return key in ("truncate", "mrope_interleaved") and isinstance(value, bool)


def _type_of(value: Any) -> str:
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT if value >= 0 else ""
    if isinstance(value, float):
        return FLOAT if isfinite(value) else ""
    kinds = {_type_of(one) for one in value} if isinstance(value, list) else set()
    return INTS if kinds == {INT} else FLOATS if kinds == {FLOAT} else ""
