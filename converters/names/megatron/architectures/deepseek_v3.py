"""DeepSeek-V3 and R1: latent attention, dense first layers, shared experts, multi-token prediction.

The Hub numbers the multi-token prediction layers after the others, and repeats embedding and output layer in each.
"""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama, qwen3_moe
from converters.names.megatron.args import common, experts, silu
from converters.names.megatron.table import Table

#: Epsilon of transformers' norms for latent queries, keys and values.
_INSIDE = 1e-6

ATTENTION = """
    input_layernorm.weight                                  input_layernorm.weight                      same
    self_attention.linear_q_proj.weight                     self_attn.q_proj.weight                     same
    self_attention.linear_q_down_proj.weight                self_attn.q_a_proj.weight                   same
    self_attention.linear_q_up_proj.layer_norm_weight       self_attn.q_a_layernorm.weight              same
    self_attention.linear_q_up_proj.weight                  self_attn.q_b_proj.weight                   same
    self_attention.linear_kv_down_proj.weight               self_attn.kv_a_proj_with_mqa.weight         same
    self_attention.linear_kv_up_proj.layer_norm_weight      self_attn.kv_a_layernorm.weight             same
    self_attention.linear_kv_up_proj.weight                 self_attn.kv_b_proj.weight                  same
    self_attention.linear_proj.weight                       self_attn.o_proj.weight                     same
"""
SHARED = """
    mlp.router.expert_bias                                  mlp.gate.e_score_correction_bias            same
    mlp.shared_experts.linear_fc1.weight                    mlp.shared_experts.[gate|up]_proj.weight    joined
    mlp.shared_experts.linear_fc2.weight                    mlp.shared_experts.down_proj.weight         same
"""
PREDICTION = """
    embedding.word_embeddings.weight                        embed_tokens.weight                         copy
    output_layer.weight                                     shared_head.head.weight                     copy
    mtp.layers.{n}.[enorm|hnorm].weight                     [enorm|hnorm].weight                        same
    mtp.layers.{n}.eh_proj.weight                           eh_proj.weight                              same
    mtp.layers.{n}.final_layernorm.weight                   shared_head.norm.weight                     same
"""


def args(sizes: Sizes, *, scaling: float = 2.5, epsilon: float = 1e-6) -> dict[str, Any]:
    """Return the arguments. `scaling` (experts' weights) and `epsilon` (norms) are the class's defaults."""
    normalised(sizes)
    interleaved(sizes)
    return latent(sizes) | routing(sizes, scaling) | {"norm_epsilon": sizes.config.number("rms_norm_eps", epsilon)}


def normalised(sizes: Sizes, *, default: bool = True) -> None:
    if not sizes.config.flag("norm_topk_prob", default):
        raise LossError("Megatron normalizes the chosen experts' scores", found="norm_topk_prob false")


def interleaved(sizes: Sizes) -> None:
    if not sizes.config.flag("rope_interleave", True):
        raise LossError("Megatron's latent attention interleaves rotary positions", found="rope_interleave false")


def latent(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments for latent attention, and for experts with a softmax router."""
    config = sizes.config
    silu(config)
    routed = experts(sizes) if sizes.num_experts else {}
    return {
        **common(sizes) | _positions(config) | routed,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": sizes.dims["qr"] or None,
        "kv_lora_rank": sizes.dims["kr"],
        "qk_head_dim": config.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.size("qk_rope_head_dim"),
        "v_head_dim": config.size("v_head_dim"),
    }


def notes(sizes: Sizes, epsilon: float = 1e-6) -> list[str]:
    """Note another epsilon in transformers' norms inside attention. Megatron has only one."""
    epsilon = sizes.config.number("rms_norm_eps", epsilon)
    ours = f"Megatron's norms for latent queries, keys and values use the config's rms_norm_eps, {epsilon:g}"
    return [] if epsilon == _INSIDE else [f"{ours}; transformers' class uses {_INSIDE:g}"]


def routing(sizes: Sizes, scaling: float = 2.5) -> dict[str, Any]:
    """Return the arguments for a sigmoid router with a bias for the choice, shared experts, multi-token prediction."""
    config = sizes.config
    _check_groups(config)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", scaling),
        "moe_router_num_groups": config.get("n_group"),
        "moe_router_group_topk": config.get("topk_group"),
        "moe_shared_expert_intermediate_size": sizes.dims["s"],
        "mtp_num_layers": len(sizes.predicted) or None,
    }


def _check_groups(config: Config) -> None:
    """Raise LossError for expert groups not scored by their best two experts.

    Megatron takes the average number chosen per group (transformer/moe/moe_utils.py, `group_limited_topk`).
    """
    groups, chosen, used = config.get("n_group"), config.get("topk_group"), config.size("num_experts_per_tok")
    if chosen and groups != chosen and used // config.size("topk_group") != 2:
        raise LossError(
            "Megatron doesn't score expert groups by two experts with these settings",
            expected="num_experts_per_tok twice topk_group, or topk_group equal to n_group",
            found=f"num_experts_per_tok {used}, topk_group {chosen}, n_group {groups}",
        )


def _positions(config: Config) -> dict[str, Any]:
    """Return MLATransformerConfig's fields (megatron-core, transformer/transformer_config.py)."""
    rope = config.rope
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise LossError(
            "Megatron does not support these rotary positions", expected="rope_type default or yarn", found=kind
        )
    found: dict[str, Any] = {"rotary_base": rope.get("rope_theta", 10000.0), "rope_type": "rope"}
    if kind == "yarn":
        apart = {name: rope.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor")}
        if apart["attention_factor"] is not None or bool(apart["mscale"]) != bool(apart["mscale_all_dim"]):
            raise LossError("Megatron scales YaRN's attention by mscale and mscale_all_dim together", found=apart)
        if rope.get("truncate") is False:
            raise LossError("Megatron's latent attention rounds YaRN's boundaries", found="truncate false")
        found |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.get("factor", 1.0),
            "original_max_position_embeddings": rope.get("original_max_position_embeddings")
            or config.size("max_position_embeddings"),
            "beta_fast": rope.get("beta_fast", 32),
            "beta_slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return found


_MOE = qwen3_moe.EXPERTS + SHARED
TABLE = Table(FAMILIES["deepseek_v3"], args, llama.TOP, ATTENTION, llama.MLP, _MOE, prediction=PREDICTION, notes=notes)
