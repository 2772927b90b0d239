"""Megatron-LM's `args` of a run, as saved in its checkpoints.

The names are Megatron-LM core_v0.16.1's (megatron/training/arguments.py).
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from train.config import Config, UserError
from train.models import DTYPES

_GELU_TANH = partial(functional.gelu, approximate="tanh")
_OFF = (
    *("rotary_interleaved", "apply_layernorm_1p", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "quick_geglu"),
    *("openai_gelu", "squared_relu", "multi_latent_attention", "moe_grouped_gemm", "data_parallel_random_init"),
)
_NONE = (
    *("no_rope_freq", "activation_func_clamp_value", "window_size", "window_attn_skip_freq", "num_experts"),
    *("moe_shared_expert_intermediate_size", "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    *("no_save_optim", "no_save_rng"),
)


def arguments(sizes: Any, config: Config) -> Namespace:
    if sizes.model_type not in _ARCHITECTURES:
        raise UserError(f"--strategy megatron: no {sizes.model_type} model")
    values = _common(sizes, config) | _ARCHITECTURES[sizes.model_type](sizes)
    values |= _parallel(config, values["vocab_size"]) | _training(config)
    if "experimental_attention_variant" in values:
        values["transformer_impl"] = "transformer_engine"  # megatron-core's local layers have no gated delta net
    _require_division(config, values)
    return Namespace(**values)


def transformer_config(args: Namespace) -> Any:
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in vars(args).items() if name in known}
    values |= {
        "num_moe_experts": args.num_experts,
        "layernorm_epsilon": args.norm_epsilon,
        "layernorm_zero_centered_gamma": args.apply_layernorm_1p,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "pipeline_dtype": args.params_dtype,
        "deallocate_pipeline_outputs": True,
        "gated_linear_unit": args.swiglu or args.quick_geglu,
        "activation_func": functional.silu if args.swiglu else quick_gelu if args.quick_geglu else functional.gelu,
        "transformer_impl": "local",
        "use_mamba_mem_eff_path": False,  # a kernel in mamba-ssm
    }
    if args.openai_gelu:
        values["activation_func"] = _GELU_TANH
    if args.squared_relu:
        values["activation_func"] = squared_relu
    made = kind(**values)
    for name, value in args.yarn.items():
        setattr(made, f"yarn_{name}", value)
    return made


def _common(sizes: Any, config: Config) -> dict[str, Any]:
    heads, groups = sizes.num_attention_heads, getattr(sizes, "num_key_value_heads", None)
    rope = getattr(sizes, "rope_parameters", None) or {}
    return (
        dict.fromkeys(_OFF, False)
        | dict.fromkeys(_NONE)
        | {
            "num_layers": sizes.num_hidden_layers,
            "hidden_size": sizes.hidden_size,
            "ffn_hidden_size": getattr(sizes, "intermediate_size", None),
            "num_attention_heads": heads,
            "group_query_attention": groups is not None and groups != heads,
            "num_query_groups": groups or heads,
            "kv_channels": getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
            "vocab_size": sizes.vocab_size,
            "max_position_embeddings": sizes.max_position_embeddings,
            "position_embedding_type": "rope",
            "add_position_embedding": True,
            "use_rotary_position_embeddings": True,
            "rotary_base": rope.get("rope_theta", 10000.0),
            "rotary_percent": rope.get("partial_rotary_factor", 1.0),
            "use_rope_scaling": rope.get("rope_type") == "llama3",
            "rope_scaling_factor": rope.get("factor", 8.0) if rope.get("rope_type") == "llama3" else 8.0,
            "yarn": {},
            "normalization": "RMSNorm",
            "norm_epsilon": getattr(sizes, "rms_norm_eps", 1e-5),
            "swiglu": True,
            "glu_linear_offset": 0.0,
            "untie_embeddings_and_output_weights": not sizes.tie_word_embeddings,
            "softmax_type": "vanilla",
            "attention_dropout": config.dropout,
            "hidden_dropout": config.dropout,
            "moe_router_load_balancing_type": "none",
            # alltoall gathers uneven parts if experts are sharded, and gloo can't do this.
            "moe_token_dispatcher_type": "allgather" if (config.etp or config.tp) > 1 else "alltoall",
        }
    )


def _experts(number: int, size: int, used: int, sparse: list[int]) -> dict[str, Any]:
    """Return the options for experts in the layers with a 1 in `sparse`."""
    return {
        "num_experts": number,
        "moe_ffn_hidden_size": size,
        "moe_router_topk": used,
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": None,
    }


def _llama(sizes: Any) -> dict[str, Any]:
    return {"add_bias_linear": bool(getattr(sizes, "mlp_bias", False))}


def _qwen3_moe(sizes: Any) -> dict[str, Any]:
    sparse = [
        int(layer not in sizes.mlp_only_layers and (layer + 1) % sizes.decoder_sparse_step == 0)
        for layer in range(sizes.num_hidden_layers)
    ]
    experts = _experts(sizes.num_experts, sizes.moe_intermediate_size, sizes.num_experts_per_tok, sparse)
    # Without normalisation, the probabilities cover all experts.
    return {"qk_layernorm": True} | experts | {"moe_router_pre_softmax": not sizes.norm_topk_prob}


def _mixtral(sizes: Any) -> dict[str, Any]:
    everywhere = [1] * sizes.num_hidden_layers
    return _experts(sizes.num_local_experts, sizes.intermediate_size, sizes.num_experts_per_tok, everywhere)


def _gpt2(sizes: Any) -> dict[str, Any]:
    return {
        "ffn_hidden_size": sizes.n_inner or 4 * sizes.n_embd,
        "position_embedding_type": "learned_absolute",
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "norm_epsilon": sizes.layer_norm_epsilon,
        "add_bias_linear": True,
        "swiglu": False,
        "openai_gelu": True,
    }


def _gpt_neox(sizes: Any) -> dict[str, Any]:
    if sizes.use_parallel_residual:
        raise UserError("--strategy megatron: megatron-core has no parallel residual")
    return {
        "kv_channels": sizes.hidden_size // sizes.num_attention_heads,
        "group_query_attention": False,
        "num_query_groups": sizes.num_attention_heads,
        "normalization": "LayerNorm",
        "norm_epsilon": sizes.layer_norm_eps,
        "add_bias_linear": True,
        "swiglu": False,
    }


def _gpt_oss(sizes: Any) -> dict[str, Any]:
    rope = sizes.rope_parameters
    return _mixtral(sizes) | {
        "position_embedding_type": "yarn",
        "yarn": {
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope["beta_fast"],
            "beta_slow": rope["beta_slow"],
            "mscale": None,
            "mscale_all_dim": None,
            "correction_range_round_to_int": rope["truncate"],
        },
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": sizes.swiglu_limit,
        "softmax_type": "learnable",
        "window_size": (sizes.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }


def _deepseek_v3(sizes: Any) -> dict[str, Any]:
    dense = sizes.first_k_dense_replace
    sparse = [int(layer >= dense) for layer in range(sizes.num_hidden_layers)]
    experts = _experts(sizes.n_routed_experts, sizes.moe_intermediate_size, sizes.num_experts_per_tok, sparse)
    return experts | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "group_query_attention": False,
        "num_query_groups": sizes.num_attention_heads,
        "kv_channels": sizes.v_head_dim,
        "q_lora_rank": sizes.q_lora_rank,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_head_dim": sizes.qk_nope_head_dim,
        "qk_pos_emb_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "rope_type": "rope",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": sizes.routed_scaling_factor,
        "moe_router_num_groups": sizes.n_group,
        "moe_router_group_topk": sizes.topk_group,
        "moe_shared_expert_intermediate_size": sizes.n_shared_experts * sizes.moe_intermediate_size,
    }


def _qwen3_next(sizes: Any) -> dict[str, Any]:
    return _qwen3_moe(sizes) | {
        "apply_layernorm_1p": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in sizes.layer_types],
        "linear_conv_kernel_dim": sizes.linear_conv_kernel_dim,
        "linear_key_head_dim": sizes.linear_key_head_dim,
        "linear_value_head_dim": sizes.linear_value_head_dim,
        "linear_num_key_heads": sizes.linear_num_key_heads,
        "linear_num_value_heads": sizes.linear_num_value_heads,
        "moe_shared_expert_intermediate_size": sizes.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


_ARCHITECTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda sizes: {"add_qkv_bias": True},
    "qwen3": lambda sizes: {"qk_layernorm": True},
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _qwen3_next,
}


def _parallel(config: Config, vocabulary: int) -> dict[str, Any]:
    multiple = config.vocab_multiple * config.tp
    world_size = dist.get_world_size()
    return {
        "world_size": world_size,
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": config.vpp if config.vpp > 1 else None,
        "num_virtual_stages_per_pipeline_rank": config.vpp if config.vpp > 1 else None,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": config.etp or config.tp,
        "context_parallel_size": 1,
        "data_parallel_size": world_size // (config.tp * config.pp),
        "sequence_parallel": config.sequence_parallel,
        "decoder_first_pipeline_num_layers": config.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": config.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": config.count_embedding,
        "account_for_loss_in_pipeline_split": config.count_loss,
        "mtp_num_layers": config.mtp_layers or None,
        "make_vocab_size_divisible_by": config.vocab_multiple,
        "padded_vocab_size": -(-vocabulary // multiple) * multiple,
        "transformer_impl": "local",
    }


def _training(config: Config) -> dict[str, Any]:
    dtype = DTYPES[config.dtype]
    return {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "seq_length": config.length,
        "global_batch_size": config.batch,
        "train_iters": config.schedule_steps,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "clip_grad": 1.0,
        "optimizer": "adam" if config.optimizer == "adamw" else "sgd",
        "seed": config.seed,
        "accumulate_allreduce_grads_in_fp32": True,
        "use_distributed_optimizer": not config.no_distributed_optimizer,
        "overlap_grad_reduce": bool(config.bucket_size),
        "ddp_bucket_size": config.bucket_size or None,
        "ckpt_format": config.saving,
        "use_dist_ckpt": config.saving != "torch",
        "use_megatron_fsdp": config.saving == "fsdp_dtensor",
        "data_parallel_sharding_strategy": "optim_grads_params" if config.saving == "fsdp_dtensor" else "no_shard",
        "ckpt_fully_parallel_save": True,
        "dist_ckpt_optim_fully_reshardable": config.optimizer_format == "fully_reshardable",
        "save": config.output,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def _require_division(config: Config, values: dict[str, Any]) -> None:
    world_size, experts = dist.get_world_size(), values["num_experts"]
    if world_size % (config.tp * config.pp):
        raise UserError(f"--tp {config.tp} --pp {config.pp}: {world_size} ranks do not divide by their product")
    _require_stages(config, values["num_layers"])
    if config.ep > 1 and not experts:
        raise UserError(f"--ep {config.ep}: --model {config.model} has no experts")
    if experts and (experts % config.ep or world_size % (config.pp * config.ep * (config.etp or config.tp))):
        raise UserError(f"--ep {config.ep}: neither {experts} experts nor {world_size} ranks may be left over")
    if experts and config.ep == 1 and config.etp not in (0, config.tp):
        raise UserError("--etp needs --ep: without it megatron-core does not reduce the expert copies' gradients")
    sizes = {name: values[name] for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")}
    for name, size in sizes.items():
        if size % config.tp:
            raise UserError(
                f"--tp {config.tp} does not divide {name} {size} (--model {config.model}); models named _wide "
                "divide by 2 and 4"
            )
    if experts and config.tp > 1 and not config.sequence_parallel:
        raise UserError("--tp with experts needs --sequence-parallel in megatron-core")
    if config.sequence_parallel and config.length % config.tp:
        raise UserError(f"--sequence-parallel: --length {config.length} does not divide by --tp {config.tp}")


def _require_stages(config: Config, layers: int) -> None:
    """Check that stages divide the layers, and chunks a stage's layers."""
    given = [number for number in (config.first_stage_layers, config.last_stage_layers) if number]
    rest, stages = layers + config.count_embedding + config.count_loss - sum(given), config.pp - len(given)
    fits = rest >= stages > 0 and rest % (stages * config.vpp) == 0 if stages else rest == 0
    if not fits or any(number % config.vpp for number in given):
        beside = f", {' and '.join(map(str, given))} of them in the first or last stage," if given else ""
        raise UserError(
            f"--pp {config.pp} --vpp {config.vpp}: {layers} layers{beside} do not divide into "
            f"{config.pp * config.vpp} chunks"
        )
