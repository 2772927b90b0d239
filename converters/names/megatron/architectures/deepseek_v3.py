"""DeepSeek-V3 and R1: latent attention, dense first layers, shared experts, multi-token prediction.

The hub numbers layers of multi-token prediction behind the others (61 in the release) and stores the embedding and
the output layer again in each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.megatron.architectures import llama
from converters.names.megatron.architectures.qwen3_moe import EXPERTS
from converters.names.megatron.args import common, experts, silu
from converters.names.megatron.rows import SPARSE, Row, gated_mlp, same
from converters.names.megatron.sizes import Config, Sizes
from converters.names.megatron.table import inside_mtp

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_A, _HA = f"{_M}.self_attention", f"{_H}.self_attn"
_P = "mtp.layers.{n}"

ATTENTION = (
    Row(f"{_M}.input_layernorm.weight", f"{_H}.input_layernorm.weight", "h", same),
    Row(f"{_A}.linear_q_proj.weight", f"{_HA}.q_proj.weight", "q h", same, only="whole queries"),
    Row(f"{_A}.linear_q_down_proj.weight", f"{_HA}.q_a_proj.weight", "qr h", same, only="latent queries"),
    Row(f"{_A}.linear_q_up_proj.layer_norm_weight", f"{_HA}.q_a_layernorm.weight", "qr", same, only="latent queries"),
    Row(f"{_A}.linear_q_up_proj.weight", f"{_HA}.q_b_proj.weight", "q qr", same, only="latent queries"),
    Row(f"{_A}.linear_kv_down_proj.weight", f"{_HA}.kv_a_proj_with_mqa.weight", "kd h", same),
    Row(f"{_A}.linear_kv_up_proj.layer_norm_weight", f"{_HA}.kv_a_layernorm.weight", "kr", same),
    Row(f"{_A}.linear_kv_up_proj.weight", f"{_HA}.kv_b_proj.weight", "ku kr", same),
    Row(f"{_A}.linear_proj.weight", f"{_HA}.o_proj.weight", "h a", same),
)

SHARED = (
    Row(f"{_M}.mlp.router.expert_bias", f"{_H}.mlp.gate.e_score_correction_bias", "e", same, only=SPARSE),
    *gated_mlp(f"{_M}.mlp.shared_experts", f"{_H}.mlp.shared_experts", "s", SPARSE),
)

MTP = (
    Row(f"{_P}.enorm.weight", f"{_H}.enorm.weight", "h", same),
    Row(f"{_P}.hnorm.weight", f"{_H}.hnorm.weight", "h", same),
    Row(f"{_P}.eh_proj.weight", f"{_H}.eh_proj.weight", "h 2h", same),
    Row(f"{_P}.final_layernorm.weight", f"{_H}.shared_head.norm.weight", "h", same),
    *inside_mtp(ATTENTION + EXPERTS + SHARED),
)


def sizes(config: Config) -> Sizes:
    heads, num_experts = config.size("num_attention_heads"), config.count("n_routed_experts")
    rope, nope, v = (config.size(f"{x}_head_dim") for x in ("qk_rope", "qk_nope", "v"))
    latent, queries = config.size("kv_lora_rank"), config.get("q_lora_rank")
    expert = config.size("moe_intermediate_size")
    dims = {
        "h": config.size("hidden_size"),
        "v": config.size("vocab_size"),
        "f": config.size("intermediate_size"),
        "a": heads * v,
        "q": heads * (nope + rope),
        "qr": 0 if queries is None else config.size("q_lora_rank"),
        "kr": latent,
        "kd": latent + rope,
        "ku": heads * (nope + v),
        "e": num_experts,
        "m": expert,
        "s": expert * config.size("n_shared_experts"),
    }
    first = config.get("first_k_dense_replace") or 0
    return Sizes(
        config.num_layers,
        dims,
        heads,
        heads,
        v,
        tied=config.flag("tie_word_embeddings"),
        sparse=frozenset(range(first, config.num_layers)),
        num_experts=num_experts,
        num_mtp=config.count("num_nextn_predict_layers", default=1) if config.get("num_nextn_predict_layers") else 0,
        holds=frozenset({"whole queries" if queries is None else "latent queries"}),
    )


def args(config: Config) -> dict[str, Any]:
    silu(config)
    found = sizes(config)
    if not config.flag("norm_topk_prob", True):
        raise LossError("Megatron normalises the scores of the chosen experts", found="norm_topk_prob false")
    if not config.flag("rope_interleave", True):
        raise LossError("Megatron's latent attention interleaves rotary positions", found="rope_interleave false")
    return (
        common(config, found)
        | _positions(config)
        | experts(config, found)
        | {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": found.dims["qr"] or None,
            "kv_lora_rank": found.dims["kr"],
            "qk_head_dim": config.size("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": config.size("qk_rope_head_dim"),
            "v_head_dim": config.size("v_head_dim"),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", 2.5),
            "moe_router_num_groups": config.get("n_group"),
            "moe_router_group_topk": config.get("topk_group"),
            "moe_shared_expert_intermediate_size": found.dims["s"],
            "mtp_num_layers": found.num_mtp or None,
        }
    )


def _positions(config: Config) -> dict[str, Any]:
    """Rotary positions, as arguments of MLATransformerConfig (megatron-core, transformer/transformer_config.py)."""
    rope = config.rope
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise LossError("Megatron has no such rotary positions", expected="rope_type default or yarn", found=kind)
    found: dict[str, Any] = {"rotary_base": rope.get("rope_theta", 10000.0), "rope_type": "rope"}
    if kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.get("factor", 1.0),
            "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
            "beta_fast": rope.get("beta_fast", 32),
            "beta_slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }
    return found


TABLE = replace(
    llama.TABLE,
    rows=llama.FINAL_NORM + ATTENTION + llama.MLP + EXPERTS + SHARED,
    sizes=sizes,
    args=args,
    mtp_rows=MTP,
    mtp_embedding="model.layers.{n}.embed_tokens.weight",
    mtp_output="model.layers.{n}.shared_head.head.weight",
    buffers=(".mlp.router.expert_bias",),
)
