"""Recorded settings of a run that a target's config can't hold.

    a setting of the training program     `run_settings`: ignored
    compared                              `COMPARED`: compared with the config, or determined by tensor shapes
    one that changes the model            `CHANGES`: accepted with the values listed there, refused with others
    unknown                               accepted and named if it is off (None, False, 0, empty), else refused

Users can accept a refused setting by name (`--accept-setting`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message, joined
from converters.names.megatron import rotary_settings
from converters.names.megatron.model.splits import ROUTED_BLOCK, SHARED_BLOCK
from converters.names.megatron.run_settings import PREFIXES, RUN_SETTINGS, names_in

#: Compared by `config_against_args`, or determined by tensors.
COMPARED = names_in(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels
    num_key_value_heads vocab_size padded_vocab_size max_position_embeddings untie_embeddings_and_output_weights
    share_embeddings_and_output_weights normalization norm_epsilon layernorm_epsilon apply_layernorm_1p
    layernorm_zero_centered_gamma qk_layernorm add_bias_linear add_qkv_bias swiglu gated_linear_unit
    squared_relu quick_geglu openai_gelu glu_linear_offset activation_func_clamp_value
    position_embedding_type add_position_embedding use_rotary_position_embeddings rotary_base rope_theta rotary_percent
    rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling rope_scaling_factor
    no_rope_freq mrope_section mrope_interleaved rope_type rotary_scaling_factor original_max_position_embeddings
    yarn beta_fast beta_slow mscale mscale_all_dim yarn_rotary_scaling_factor yarn_original_max_position_embeddings
    yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale yarn_mscale_all_dim
    window_size window_attn_skip_freq softmax_type attention_output_gate
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    is_hybrid_model hybrid_override_pattern hybrid_layer_pattern
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    num_experts num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_router_topk moe_router_pre_softmax moe_router_score_function
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    mtp_num_layers bert_binary_head gpt_j_residual use_parallel_residual
    """
)
#: Settings that no Hub config can hold, with harmless values. None, False, 0 and empty values are harmless, too.
#: Sources: megatron-core 0.12 to 0.19 (transformer/transformer_config.py), Megatron-DeepSpeed (megatron/arguments.py),
#: Pai-Megatron-Patch, ms-swift.
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "softmax_scale": (),
    "activation_func": (),  # recorded if Megatron-LM has no argument for it
    "qk_l2_norm": (),  # norms without weights, for queries and keys
    "export_qk_l2_norm": (),
    "apply_residual_connection_post_layernorm": (),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),  # not sinkhorn
    "moe_router_topk_limited_devices": (),
    "moe_router_force_load_balancing": (),
    "moe_router_force_biased": (),
    "moe_apply_probs_on_input": (),
    "export_moe_apply_probs_on_input": (),
    "moe_expert_capacity_factor": (-1, -1.0),  # drops tokens
    "moe_expert_rank_capacity_factor": (-1, -1.0),
    "moe_token_dropping": (True,),  # refused by megatron-core, and Megatron-DeepSpeed's default
    "moe_latent_size": (),
    ROUTED_BLOCK: (),  # undone by the readers of Megatron-LM's own runs
    SHARED_BLOCK: (),
    "low_freq_factor": (1, 1.0),  # NeMo's Llama31Config; its other field is compared
    "high_freq_factor": (4, 4.0),
    "old_context_len": (8192,),
    "use_mup": (),
    "enable_mhc_connections": (),
    "enable_hyper_connections": (),
    "mtp_use_repeated_layer": (),
    "mtp_hsm": (),
    "mtp_hybrid_override_pattern": (),
    "heterogeneous_block_specs": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "hybrid_attention_ratio": (),
    "hybrid_mlp_ratio": (),
    "hybrid_stack_spec": (),
    "custom_model_provider_path": (),  # slime and miles: code for another model
    "spec": (),
    "transformer_layer_spec": (),
    "yaml_cfg": (),
    "retro_add_retriever": (),
    "language_model_type": (),
    "use_arbitrary_attention_mask": (),
    "flextron": (),
    "enable_gpt_oss": (),
    "mlp_type": ("standard",),  # Megatron-DeepSpeed's residual experts
    "moe_eval_capacity_factor": (1.0,),  # default, also for models without experts
    "moe_train_capacity_factor": (1.0,),
    "moe_min_capacity": (4,),
    "expert_interval": (2,),
    "topk": (1,),
    "embed_layernorm": (),
    "rotary_scale_factor": (1, 1.0),
    "router_type": ("topk",),
    "transformer_type": ("megatron",),
    "moe_topk": (1,),
    "add_bias_linear_fc": (True,),  # tensors show it
    "add_bias_attn_fc": (True,),
    "use_alibi_mask": (),
    "num_labels": (),
    "apply_embedding_scaling": (),  # NeMo 1
    "attention_type": ("multihead",),
    "headscale": (),
    "hyena": (),
    "megatron_legacy": (),  # orders query, key and value rows differently
    "normalize_attention_scores": (True,),
    "transformer_block_type": ("pre_ln",),
    "language_model": (),  # config for a model with images
    "encoder": (),  # encoders and decoders
    "decoder": (),
}
#: Two names of one setting.
ALIASES = (
    ("num_experts", "num_moe_experts"),
    ("rotary_base", "rope_theta"),
    ("num_query_groups", "num_key_value_heads"),
    ("norm_epsilon", "layernorm_epsilon"),
    ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    ("gpt_j_residual", "use_parallel_residual"),
    ("hybrid_layer_pattern", "hybrid_override_pattern"),
    ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor"),
    ("rope_scaling_factor", "scale_factor"),
    ("use_rope_scaling", "rope_scaling"),
)
#: Settings with opposite meanings.
OPPOSITES = (("share_embeddings_and_output_weights", "untie_embeddings_and_output_weights"),)
#: Settings ignored unless another one is on.
_IF_ON = {"num_query_groups": "group_query_attention"}
#: Layer code. Other settings determine layers built by these packages.
_CODE = ("spec", "transformer_layer_spec", "hybrid_stack_spec")
_PACKAGES = ("megatron.core.", "megatron.bridge.")
_OFF: tuple[Any, ...] = (None, False, "", [], (), {})
_MOST = 6


def is_run_setting(name: str) -> bool:
    return name in RUN_SETTINGS or name.startswith(PREFIXES)


def changing(
    recorded: Mapping[str, Any], expected: Mapping[str, Any], accepted: Collection[str] = ()
) -> dict[str, Any]:
    """Return settings that change the model, unless the config or this version expresses them."""
    found = {}
    for name, value in recorded.items():
        if name in accepted or name in COMPARED or is_run_setting(name):
            continue
        allowed = CHANGES.get(name, ())
        if name in _CODE and str(value[0] if isinstance(value, list | tuple) and value else value).startswith(
            _PACKAGES
        ):
            continue
        values = value if name in CHANGES and isinstance(value, list | tuple) and value else [value]
        if all(is_off(one) or one in allowed or one == expected.get(name) for one in values):
            continue
        found[name] = value
    return found


def is_off(value: Any) -> bool:
    return (isinstance(value, int | float) and value == 0) or any(
        value is one if one is None or one is False else value == one for one in _OFF
    )


def unknown_and_off(recorded: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in recorded.items()
        if is_off(value) and name not in COMPARED and name not in CHANGES and not is_run_setting(name)
    ]


def check_settings(
    recorded: Mapping[str, Any], expected: Mapping[str, Any], path: str, accepted: Collection[str] = ()
) -> None:
    if found := changing(recorded, expected, accepted):
        raise unexpressed(found, path)


def unexpressed(found: Mapping[str, Any], path: str) -> LossError:
    known = [name for name in found if name in CHANGES or name in COMPARED]
    parts = [
        f"{name} {_short(value)}" + ("" if name in known else " (unknown to ckpt)") for name, value in found.items()
    ]
    shown = parts[:_MOST] + ([f"and {len(parts) - _MOST} more"] if len(parts) > _MOST else [])
    order = ROUTED_BLOCK in found or SHARED_BLOCK in found
    return LossError(
        "the model's config can't hold some recorded settings, and they "
        + ("change" if known else "may change")
        + " the model's results",
        path=path,
        expected="settings supported by the config, or without effect",
        found=", ".join(shown),
        hint=Message(
            "{accept_settings} ignores {}, in ckpt convert, merge-lora, verify, diff, hash and mount",
            "it" if len(found) == 1 else "them",
            accept_settings=[*found],
        )
        + ("; Megatron-Bridge saves rows either in blocks or in order, without recording the choice" if order else ""),
    )


def check_aliases(recorded: Mapping[str, Any], path: str) -> None:
    """Raise LossError if two names of one setting disagree."""
    for stated in (*_contradictions(recorded), *rotary_settings.contradictions(recorded)):
        raise LossError(
            "the run recorded two different values for one setting",
            path=path,
            expected=f"one value for {' and '.join(stated)}",
            found=", ".join(f"{name} {_short(value)}" for name, value in stated.items()),
            hint=joined(
                " or ", (Message("{accept_settings}", accept_settings=[name.partition(".")[0]]) for name in stated)
            )
            + " ignores the wrong one",
        )


def _contradictions(recorded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for names in (*ALIASES, *OPPOSITES):
        one, other = (_without_stages(recorded.get(name)) for name in names)
        if names[1] == "rope_scaling" and not isinstance(other, bool):
            continue  # config.json's
        is_stated = None not in (one, other) and recorded.get(_IF_ON.get(names[0], ""), True)
        if is_stated and (one == other) == (names in OPPOSITES):
            yield {name: recorded[name] for name in names}


def _without_stages(value: Any) -> Any:
    return value.replace("|", "") if isinstance(value, str) else value


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def notes_on_unknown(recorded: Mapping[str, Any]) -> Iterator[str]:
    if names := unknown_and_off(recorded):
        shown = ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
        found = f"{pluralize(len(names), 'recorded setting')} unknown to ckpt"
        yield f"{found} {'is' if len(names) == 1 else 'are'} off (None, False, 0 or empty): {shown}"
