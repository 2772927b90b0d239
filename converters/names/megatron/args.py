"""Megatron-LM's arguments shared by several tables.

Megatron-LM core_v0.16.1, megatron/training/arguments.py and argument_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, log
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.config import Config
from converters.names.families.rows import Sizes

#: Fixed by Megatron-LM's `--use-rope-scaling` (models/common/embeddings/rotary_pos_embedding.py).
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_DTYPES = ("float32", "bfloat16", "float16")


def common(sizes: Sizes) -> dict[str, Any]:
    config, dims = sizes.config, sizes.dims
    return {
        "num_layers": sizes.num_layers,
        "hidden_size": dims["h"],
        "ffn_hidden_size": dims["f"],
        "num_attention_heads": dims["heads"],
        "group_query_attention": dims["groups"] != dims["heads"],
        "num_query_groups": dims["groups"],
        "kv_channels": dims["d"],
        "vocab_size": dims["v"],
        "max_position_embeddings": config.size("max_position_embeddings", "n_positions", "n_ctx"),
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": True,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "apply_layernorm_1p": False,
        "qk_layernorm": sizes.has("self_attn.q_norm.weight"),
        "add_bias_linear": sizes.has("self_attn.o_proj.bias"),
        "add_qkv_bias": sizes.has("self_attn.q_proj.bias"),
        "swiglu": True,
        "quick_geglu": False,
        "openai_gelu": False,
        "squared_relu": False,
        "no_rope_freq": None,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "untie_embeddings_and_output_weights": not sizes.tied,
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "attention_dropout": config.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "multi_latent_attention": False,
        "num_experts": None,
        "mtp_num_layers": None,
        "make_vocab_size_divisible_by": 128,
        **dtype(config),
    }


def gated(
    sizes: Sizes,
    *,
    base: float = 10000.0,
    partial: float | None = None,
    slides: bool | str = True,
    listed: bool = False,
    epsilon: float = 1e-6,
) -> dict[str, Any]:
    """Return arguments for Llama-like models: SwiGLU, rotary positions, experts.

    `slides` may name the config's flag for the window. `layer_types` then lists the layers, as with `listed` (see
    `window`). `base`, `partial` (see `rotary`) and `epsilon` are the class's defaults.
    """
    config = sizes.config
    silu(config)
    more = experts(sizes) if sizes.num_experts else {}
    used = config.flag(slides) if isinstance(slides, str) else slides
    if not slides and config.flag("use_sliding_window"):
        raise LossError("ckpt knows this architecture without a sliding window", found="use_sliding_window true")
    slide = window(config, used=used, listed=listed or isinstance(slides, str))
    norm = {"norm_epsilon": config.number("rms_norm_eps", epsilon)}
    return common(sizes) | rotary(config, base, partial) | slide | norm | more


def dtype(config: Config) -> dict[str, Any]:
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stated not in _DTYPES:
        return {}
    return {"params_dtype": f"torch.{stated}", "bf16": stated == "bfloat16", "fp16": stated == "float16"}


def silu(config: Config) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise LossError("Megatron does not support this gated activation", expected="hidden_act silu", found=activation)


def rotary(config: Config, base: float = 10000.0, partial: float | None = None) -> dict[str, Any]:
    """Return rotary positions: plain, scaled like Llama 3.1's, or linear. Raise LossError for others.

    `base` and `partial`, the rotated part of each head, are the class's defaults. Classes without `partial` always
    rotate whole heads.
    """
    rope = config.rope
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise LossError("Megatron has the same rotary positions in all layers", found=sorted(rope))
    kind = rope["rope_type"]
    found: dict[str, Any] = {
        "rotary_base": _plain_number(rope.get("rope_theta", base)),
        "rotary_percent": 1.0 if partial is None else rope.get("partial_rotary_factor", partial),
    }
    if kind == "llama3":
        differing = {key: rope.get(key) for key, value in _LLAMA3.items() if rope.get(key) != value}
        if differing:
            raise LossError("Megatron's rotary position scaling is fixed", expected=_LLAMA3, found=differing)
        return found | {"use_rope_scaling": True, "rope_scaling_factor": rope.get("factor", 8.0)}
    if kind == "linear":
        return found | {"rotary_seq_len_interpolation_factor": _plain_number(rope.get("factor"))}
    if kind not in ("default", "mrope"):  # see `mrope`
        raise LossError(
            "Megatron does not support these rotary positions for this architecture",
            expected="rope_type default, llama3 or linear",
            found=kind,
        )
    return found


def mrope(config: Config, sections: tuple[int, ...], *, interleaved: bool) -> dict[str, Any]:
    """Return rotary positions for time, height and width, equal in a text. `sections` counts their frequencies."""
    stated = config.rope.get("mrope_section")
    found = {"position_embedding_type": "mrope", "mrope_section": list(stated or sections)}
    return found | ({"mrope_interleaved": True} if interleaved else {})


def yarn(config: Config, base: float) -> dict[str, Any]:
    """Return YaRN's positions. Raise LossError for another scale of attention."""
    rope = config.rope
    scale, usual = rope.get("attention_factor"), 0.1 * log(max(rope.get("factor", 1.0), 1)) + 1
    if scale is not None and not isclose(scale, usual, rel_tol=1e-6):
        raise LossError("Megatron scales YaRN's attention by its factor", expected=f"{usual:g}", found=scale)
    return {
        "position_embedding_type": "yarn",
        "rotary_base": _plain_number(rope.get("rope_theta", base)),
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "yarn_original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
        "yarn_beta_fast": rope.get("beta_fast", 32.0),
        "yarn_beta_slow": rope.get("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
        "mscale": rope.get("mscale"),
        "mscale_all_dim": rope.get("mscale_all_dim"),
    }


def unrotated(sizes: Sizes) -> dict[str, Any]:
    layers = sizes.config.get("layer_types")
    if not isinstance(layers, list):
        raise LossError("the config doesn't list the layers with rotary positions", expected="layer_types")
    return {"no_rope_freq": [int(kind != "sliding_attention") for kind in layers]}


def window(config: Config, *, used: bool = True, listed: bool = False) -> dict[str, Any]:
    """Return the sliding window. transformers counts the token itself, Megatron does not.

    If `listed`, raise LossError if `layer_types` does not list the layers with a window.
    """
    size = config.get("sliding_window")
    if not used or size is None:
        return {}
    layers = config.get("layer_types")
    if listed and not layers:
        raise LossError("the config doesn't list the layers with a sliding window", expected="layer_types")
    slides = [kind == "sliding_attention" for kind in layers] if isinstance(layers, list) else [True]
    if not any(slides):
        return {}
    found: dict[str, Any] = {"window_size": (config.size("sliding_window") - 1, 0)}
    if all(slides):
        return found
    alternating = [number % 2 == 0 for number in range(len(slides))]
    return found | {"window_attn_skip_freq": 2 if slides == alternating else [int(slide) for slide in slides]}


def experts(sizes: Sizes) -> dict[str, Any]:
    sparse = [int(layer in sizes.sparse) for layer in range(sizes.num_layers)]
    return {
        "num_experts": sizes.num_experts,
        "moe_ffn_hidden_size": sizes.dims["m"],
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_router_topk": sizes.config.size("num_experts_per_tok", "num_experts_per_token"),
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_shared_expert_intermediate_size": None,
    }


def _plain_number(value: Any) -> Any:
    """Return whole numbers as integers, like `--rotary-base`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
