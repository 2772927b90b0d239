"""Tables of model types: the output of `save_pretrained` in transformers 5.23 (`modeling_*.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.config import Config, architectures
from converters.names.families.rows import DENSE, SPARSE, Family, Saved

# -- rows ------------------------------------------------------------------------------------------------------

QKVO = """
    self_attn.q_proj.weight a h
    self_attn.[k|v]_proj.weight k h
    self_attn.o_proj.weight h a
"""
BIASES = """
    self_attn.q_proj.bias a ? attention_bias
    self_attn.[k|v]_proj.bias k ? attention_bias
"""
OUT_BIAS = "self_attn.o_proj.bias h ? attention_bias \n"
HEAD_NORMS = "self_attn.[q|k]_norm.weight d \n"
WHOLE_NORMS = "self_attn.q_norm.weight a \n self_attn.k_norm.weight k \n"
NORMS = "[input|post_attention]_layernorm.weight h \n"
NORM_BIASES = "[input|post_attention]_layernorm.bias h \n"
AFTER_NORMS = "post_[attention|feedforward]_layernorm.weight h \n"
SANDWICH = NORMS + "[pre|post]_feedforward_layernorm.weight h \n"
MLP = """
    mlp.[gate|up]_proj.weight f h ? !sparse
    mlp.down_proj.weight h f ? !sparse
"""
MLP_BIASES = """
    mlp.[gate|up]_proj.bias f ? !sparse mlp_bias
    mlp.down_proj.bias h ? !sparse mlp_bias
"""
UP_DOWN = """
    mlp.up_proj.weight f h
    mlp.down_proj.weight h f
    mlp.up_proj.bias f ? mlp_bias
    mlp.down_proj.bias h ? mlp_bias
"""
FUSED_MLP = "mlp.gate_up_proj.weight 2f h \n mlp.down_proj.weight h f \n"
GATE = "mlp.gate.weight e h ? sparse \n"
ROUTED = """
    mlp.experts.{e}.[gate|up]_proj.weight m h ? sparse
    mlp.experts.{e}.down_proj.weight h m ? sparse
"""
EXPERTS = ROUTED + GATE
BLOCK_EXPERTS = """
    block_sparse_moe.gate.weight e h
    block_sparse_moe.experts.{e}.w[1|3].weight f h
    block_sparse_moe.experts.{e}.w2.weight h f
"""
SHARED_EXPERTS = """
    mlp.shared_experts.[gate|up]_proj.weight s h ? sparse
    mlp.shared_experts.down_proj.weight h s ? sparse
"""
GATED_SHARED_EXPERT = """
    mlp.shared_expert.[gate|up]_proj.weight s h ? sparse
    mlp.shared_expert.down_proj.weight h s ? sparse
    mlp.shared_expert_gate.weight 1 h ? sparse
"""
CORRECTION = "mlp.gate.e_score_correction_bias e ? sparse \n"
LATENT = """
    self_attn.q_proj.weight q h ? !q_lora_rank
    self_attn.q_a_proj.weight qr h ? q_lora_rank
    self_attn.q_a_proj.bias qr ? q_lora_rank attention_bias
    self_attn.q_a_layernorm.weight qr ? q_lora_rank
    self_attn.q_b_proj.weight q qr ? q_lora_rank
    self_attn.kv_a_proj_with_mqa.weight kd h
    self_attn.kv_a_proj_with_mqa.bias kd ? attention_bias
    self_attn.kv_a_layernorm.weight kr
    self_attn.kv_b_proj.weight ku kr
    self_attn.o_proj.weight h a
    self_attn.o_proj.bias h ? attention_bias
"""
PREDICTION = """
    embed_tokens.weight v h
    [enorm|hnorm].weight h
    eh_proj.weight h 2h
    shared_head.norm.weight h
    shared_head.head.weight v h
"""
NORM_WITH_BIAS = "norm.[weight|bias] h"
TIED = {"tie_word_embeddings": True}
GPT = """
    ln_1.[weight|bias] h
    attn.c_attn.weight c h
    attn.c_attn.bias c
    attn.c_proj.weight h h
    attn.c_proj.bias h
    ln_2.[weight|bias] h
    mlp.c_fc.weight f h
    mlp.c_fc.bias f
    mlp.c_proj.weight h f
    mlp.c_proj.bias h
"""


# -- layers ----------------------------------------------------------------------------------------------------


def _experts(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    expert = config.size("moe_intermediate_size", "intermediate_size")
    number = config.natural("n_shared_experts", "moe_num_shared_experts") or 1
    return {"m": expert, "s": config.size("shared_expert_intermediate_size", default=expert * number)}


def _latent(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    """Return sizes for DeepSeek's attention."""
    heads = dims["heads"]
    rope, nope, value = (config.size(f"{part}_head_dim") for part in ("qk_rope", "qk_nope", "v"))
    rank = config.size("kv_lora_rank")
    queries = config.size("q_lora_rank") if config.get("q_lora_rank") else 0
    found = {"q": heads * (nope + rope), "qr": queries, "kr": rank, "kd": rank + rope, "ku": heads * (nope + value)}
    return {**found, **_experts(config, dims)}


def _linear(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    """Return sizes for Qwen3-Next's linear attention."""
    heads = {part: config.size(f"linear_num_{part}_heads") for part in ("key", "value")}
    keys, values = (heads[part] * config.size(f"linear_{part}_head_dim") for part in ("key", "value"))
    return {
        **_experts(config, dims),
        "lq": 2 * keys + 2 * values,
        "lc": 2 * keys + values,
        "lv": values,
        "lh": heads["value"],
        "lg": heads["key"],
        "le": config.size("linear_key_head_dim"),
        "ld": config.size("linear_value_head_dim"),
        "lk": config.size("linear_conv_kernel_dim"),
    }


def _all_sparse(config: Config, layer: int) -> Collection[str]:
    return (SPARSE,)


def _behind_dense(config: Config, layer: int) -> Collection[str]:
    return (SPARSE if layer >= config.natural("first_k_dense_replace") else DENSE,)


def _by_mlp_type(config: Config, layer: int) -> Collection[str]:
    """Return a layer's kind: sparse after the first dense layers, by default one."""
    types = config.get("mlp_layer_types")
    if types is None:
        return (SPARSE if layer >= config.number("first_k_dense_replace", 1) else DENSE,)
    if not isinstance(types, list) or len(types) <= layer:
        raise CorruptError("the config does not list every layer", expected=f"mlp_layer_types[{layer}]", found=types)
    return (SPARSE if types[layer] == "sparse" else DENSE,)


def _by_step(config: Config, layer: int) -> Collection[str]:
    dense = layer in config.numbers("mlp_only_layers") or (layer + 1) % config.size("decoder_sparse_step", default=1)
    return (DENSE if dense else SPARSE,)


def _linear_by_type(config: Config, layer: int, by_rule: bool) -> Collection[str]:
    types = config.get("layer_types")
    if not types:
        return ("linear",) if by_rule else ()
    if not isinstance(types, list) or len(types) <= layer:
        raise CorruptError("the config does not list every layer", expected=f"layer_types[{layer}]", found=types)
    return ("linear",) if types[layer] == "linear_attention" else ()


def _with_linear(config: Config, layer: int) -> Collection[str]:
    return (*_by_step(config, layer), *_linear_by_interval(config, layer))


def _linear_by_interval(config: Config, layer: int) -> Collection[str]:
    interval = config.size("full_attention_interval", default=4)
    return _linear_by_type(config, layer, (layer + 1) % interval != 0)


def _ernie(config: Config, layer: int) -> Collection[str]:
    first = config.get("moe_layer_start_index")
    last = config.get("moe_layer_end_index")
    last = config.num_layers - 1 if last is None or last == -1 else last
    step = config.size("moe_layer_interval", default=1)
    return (SPARSE if first <= layer <= last and (layer + 1) % step == 0 else DENSE,)


def _llama4(config: Config, layer: int) -> Collection[str]:
    chosen = config.get("moe_layers")
    if chosen is None:
        step = config.size("interleave_moe_layer_step", default=1)
        chosen = range(step - 1, config.num_layers, step)
    return (SPARSE if layer in chosen else DENSE,)


def _mamba(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    hidden, state = dims["h"], config.size("state_size")
    rank = config.get("time_step_rank")
    rank = -(-hidden // 16) if rank == "auto" else config.size("time_step_rank")
    inner = config.size("intermediate_size", default=int(config.number("expand") * hidden))
    return {"f": inner, "n": state, "c": config.size("conv_kernel"), "r": rank, "x": rank + 2 * state}


def _mamba2(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    """Return sizes for Nemotron-H's Mamba-2 mixer and experts."""
    heads = config.size("mamba_num_heads")
    inner = heads * config.size("mamba_head_dim")
    groups = config.size("n_groups") * config.size("ssm_state_size")
    return {
        "m": config.size("moe_intermediate_size"),
        "s": config.size("moe_shared_expert_intermediate_size"),
        "mh": heads,
        "mi": inner,
        "mc": inner + 2 * groups,
        "mp": 2 * inner + 2 * groups + heads,
        "mk": config.size("conv_kernel"),
    }


#: Nemotron-H's layers, by pattern letter or by name, including older names.
_BLOCKS = {"M": "mamba", "*": "attention", "-": DENSE, "E": SPARSE}
_BLOCKS |= {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "attention", "attention": "attention"}
_BLOCKS |= {"mlp": DENSE, "moe": SPARSE}
#: Default layers in its class.
_DEFAULT_BLOCKS = "ME*-"


def _by_block(config: Config, layer: int) -> Collection[str]:
    """Return a layer's kind: from `layers_block_type`, or from the pattern in released files."""
    blocks = config.get("layers_block_type") or config.get("hybrid_override_pattern") or _DEFAULT_BLOCKS
    known = blocks[layer] if isinstance(blocks, list | str) and layer < len(blocks) else None
    if not isinstance(known, str) or known not in _BLOCKS:
        raise CorruptError(
            "the config gives no known type for a layer", expected=f"layers_block_type[{layer}]", found=known
        )
    return (_BLOCKS[known],)


# -- families --------------------------------------------------------------------------------------------------

_ATTENTION = QKVO + BIASES + OUT_BIAS
_LLAMA = Family("Llama", _ATTENTION + MLP + MLP_BIASES + NORMS)
_QWEN2 = Family("Qwen2", QKVO + BIASES.replace("? attention_bias", "") + MLP + NORMS)
_QWEN3 = Family("Qwen3", _ATTENTION + HEAD_NORMS + MLP + NORMS, defaults={"head_dim": 128})
_MISTRAL = Family("Mistral", QKVO + MLP + NORMS, absent={"sliding_window": 4096})
_OLMO2 = Family("Olmo2", _ATTENTION + WHOLE_NORMS + MLP + AFTER_NORMS)
_GEMMA2 = Family("Gemma2", _ATTENTION + MLP + SANDWICH, defaults={"head_dim": 256, **TIED})
_DEEPSEEK = Family(
    "DeepseekV3",
    LATENT + MLP + EXPERTS + SHARED_EXPERTS + CORRECTION + NORMS,
    spelled={"v_head_dim": "head_dim"},
    unread=("num_key_value_heads",),
    dims=_latent,
    experts=("n_routed_experts",),
    kinds=_behind_dense,
    prediction=PREDICTION,
)
_GPTJ = Family(
    "GPTJ",
    """
    ln_1.[weight|bias] h
    attn.[k|v|q|out]_proj.weight h h
    mlp.fc_in.weight f h
    mlp.fc_in.bias f
    mlp.fc_out.weight h f
    mlp.fc_out.bias h
    """,
    top="wte.weight v h",
    final="ln_f.[weight|bias] h",
    base="transformer",
    layers="h",
    output="lm_head.weight v h \n lm_head.bias v",
)
_GLM4_MOE = Family(
    "Glm4Moe",
    QKVO
    + BIASES
    + HEAD_NORMS.rstrip(" \n")
    + " ? use_qk_norm \n"
    + MLP
    + EXPERTS
    + SHARED_EXPERTS
    + CORRECTION
    + NORMS,
    dims=_experts,
    experts=("n_routed_experts",),
    kinds=_behind_dense,
    prediction=PREDICTION,
)
_BAILING = Family(
    "BailingMoeV2",
    """
    attention.query_key_value.weight qkv h
    attention.[query|key]_layernorm.weight d ? use_qk_norm
    attention.dense.weight h a
    """
    + MLP
    + EXPERTS
    + "mlp.gate.expert_bias e ? sparse moe_router_enable_expert_bias \n"
    + SHARED_EXPERTS
    + NORMS,
    top="word_embeddings.weight v h",
    defaults={"use_qk_norm": True, "moe_router_enable_expert_bias": True},
    spelled={"num_shared_experts": "n_shared_experts"},
    dims=lambda config, dims: {"qkv": dims["a"] + 2 * dims["k"], **_experts(config, dims)},
    experts=("num_experts",),
    kinds=_behind_dense,
    unknown=("use_bias", "use_qkv_bias"),
    own_code=True,
    prediction="[enorm|hnorm|final_layernorm].weight h \n eh_proj.weight h 2h",
)
_GATED_ATTENTION = """
    self_attn.q_proj.weight 2a h ? !linear
    self_attn.[k|v]_proj.weight k h ? !linear
    self_attn.o_proj.weight h a ? !linear
    self_attn.[q|k]_norm.weight d ? !linear
    self_attn.q_proj.bias 2a ? !linear attention_bias
    self_attn.[k|v]_proj.bias k ? !linear attention_bias
    self_attn.o_proj.bias h ? !linear attention_bias
"""
_DELTA = """
    linear_attn.[dt_bias|A_log] lh ? linear
    linear_attn.conv1d.weight lc 1 lk ? linear
"""
_DELTA_JOINED = """
    linear_attn.in_proj_qkvz.weight lq h ? linear
    linear_attn.in_proj_ba.weight 2lh h ? linear
    linear_attn.norm.weight ld ? linear
    linear_attn.out_proj.weight h lv ? linear
"""
_DELTA_APART = """
    linear_attn.norm.weight ld ? linear
    linear_attn.out_proj.weight h lv ? linear
    linear_attn.in_proj_qkv.weight lc h ? linear
    linear_attn.in_proj_z.weight lv h ? linear
    linear_attn.in_proj_[b|a].weight lh h ? linear
"""
_QWEN3_NEXT = Family(
    "Qwen3Next",
    _GATED_ATTENTION + _DELTA + _DELTA_JOINED + MLP + GATE + ROUTED + GATED_SHARED_EXPERT + NORMS,
    # The release has one multi-token prediction layer, missing from its config.json.
    defaults={"head_dim": 256, "linear_conv_kernel_dim": 4, "num_nextn_predict_layers": 1, "norm_topk_prob": True},
    dims=_linear,
    experts=("num_experts",),
    kinds=_with_linear,
    prediction="""
    fc.weight h 2h
    [pre_fc_norm_embedding|pre_fc_norm_hidden|norm].weight h
    """,
    predicted="mtp.",
    inside="layers.0.",
)
_NEMOTRON = Family("Nemotron", _ATTENTION + UP_DOWN + NORMS + NORM_BIASES, final=NORM_WITH_BIAS)
_GLM = Family("Glm", QKVO + BIASES + FUSED_MLP + NORMS, defaults={"head_dim": 128, "attention_bias": True})

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, stem="Ministral"),
    "ministral3": replace(_MISTRAL, stem="Ministral3", defaults={"head_dim": 128}),
    "mixtral": Family(
        "Mixtral",
        QKVO + BLOCK_EXPERTS + NORMS,
        dims=_experts,
        experts=("num_local_experts", "num_experts"),
        kinds=_all_sparse,
        memory="mlp block_sparse_moe",
    ),
    "qwen2": _QWEN2,
    "mimo": replace(
        _QWEN2,
        stem="MiMo",
        own_code=True,
        prediction="""
        [token|hidden|final]_layernorm.weight h
        input_proj.weight h 2h
        """,
        predicted="mtp_layers",
    ),
    "qwen3": _QWEN3,
    "qwen2_moe": replace(
        _QWEN2,
        stem="Qwen2Moe",
        layer=(QKVO + BIASES).replace("attention_bias", "qkv_bias") + MLP + GATE + ROUTED + GATED_SHARED_EXPERT + NORMS,
        defaults={"qkv_bias": True},
        dims=_experts,
        experts=("num_experts",),
        kinds=_by_step,
    ),
    "qwen3_moe": replace(
        _QWEN3,
        stem="Qwen3Moe",
        layer=_QWEN3.layer + EXPERTS,
        defaults={},
        dims=_experts,
        experts=("num_experts", "num_local_experts"),
        kinds=_by_step,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        stem="Qwen3_5",
        defaults={"head_dim": 256, "linear_conv_kernel_dim": 4},
        spelled={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
        layer=_GATED_ATTENTION + _DELTA + _DELTA_APART + MLP + NORMS,
        kinds=_linear_by_interval,
        experts=(),
        memory="^model ^model.language_model read",
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        stem="Qwen3_5Moe",
        defaults={"head_dim": 256, "linear_conv_kernel_dim": 4},
        spelled={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
        layer=_GATED_ATTENTION + _DELTA + _DELTA_APART + GATE + ROUTED + GATED_SHARED_EXPERT + NORMS,
        kinds=lambda config, layer: (SPARSE, *_linear_by_interval(config, layer)),
        memory="^model ^model.language_model read",
    ),
    "nemotron_h": Family(
        "NemotronH",
        """
        norm.weight h
        mixer.[dt_bias|A_log|D] mh ? mamba
        mixer.conv1d.weight mc 1 mk ? mamba
        mixer.conv1d.bias mc ? mamba use_conv_bias
        mixer.in_proj.weight mp h ? mamba
        mixer.norm.weight mi ? mamba
        mixer.out_proj.weight h mi ? mamba
        mixer.q_proj.weight a h ? attention
        mixer.[k|v]_proj.weight k h ? attention
        mixer.o_proj.weight h a ? attention
        mixer.up_proj.weight f h ? dense
        mixer.down_proj.weight h f ? dense
        mixer.experts.{e}.up_proj.weight m h ? sparse
        mixer.experts.{e}.down_proj.weight h m ? sparse
        mixer.gate.weight e h ? sparse
        mixer.gate.e_score_correction_bias e ? sparse
        mixer.shared_experts.up_proj.weight s h ? sparse
        mixer.shared_experts.down_proj.weight h s ? sparse
        """,
        top="embeddings.weight v h",
        final="norm_f.weight h",
        base="backbone",
        defaults={
            "num_hidden_layers": len(_DEFAULT_BLOCKS),
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        spelled={"attention_head_dim": "head_dim"},
        dims=_mamba2,
        experts=("n_routed_experts",),
        kinds=_by_block,
        unknown=("use_bias", "mlp_bias", "moe_latent_size", "tie_word_embeddings"),  # the class ties nothing
        ignored=(r"mtp.*",),
        memory="^model ^backbone",
    ),
    "gemma": Family("Gemma", _ATTENTION + MLP + NORMS, defaults={"head_dim": 256, **TIED}),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, stem="Gemma3", layer=_GEMMA2.layer + HEAD_NORMS),
    "phi": Family(
        "Phi",
        """
        self_attn.q_proj.weight a h
        self_attn.q_proj.bias a
        self_attn.[k|v]_proj.weight k h
        self_attn.[k|v]_proj.bias k
        self_attn.dense.weight h a
        self_attn.dense.bias h
        self_attn.[q|k]_layernorm.[weight|bias] d ? qk_layernorm
        mlp.fc1.weight f h
        mlp.fc1.bias f
        mlp.fc2.weight h f
        mlp.fc2.bias h
        input_layernorm.[weight|bias] h
        """,
        final="final_layernorm.[weight|bias] h",
        output="lm_head.weight v h \n lm_head.bias v",
    ),
    "phi3": Family(
        "Phi3",
        "self_attn.o_proj.weight h a \n self_attn.qkv_proj.weight qkv h \n" + FUSED_MLP + NORMS,
        dims=lambda config, dims: {"qkv": dims["a"] + 2 * dims["k"]},
    ),
    "phimoe": Family(
        "Phimoe",
        _ATTENTION + BLOCK_EXPERTS + NORMS + NORM_BIASES,
        final=NORM_WITH_BIAS,
        output="lm_head.weight v h \n lm_head.bias v ? lm_head_bias",
        experts=("num_local_experts",),
        memory="mlp block_sparse_moe \n router.weight gate.weight",
    ),
    "gpt2": Family(
        "GPT2",
        GPT,
        conv1d=True,
        top="wte.weight v h \n wpe.weight p h",
        final="ln_f.[weight|bias] h",
        base="transformer",
        layers="h",
        causal="LMHeadModel",
        defaults=TIED,
        dims=lambda config, dims: {"p": config.size("n_positions", "n_ctx"), "c": 3 * dims["h"]},
        ignored=(r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
        unknown=("add_cross_attention",),
    ),
    "gpt_bigcode": Family(
        "GPTBigCode",
        GPT,
        top="wte.weight v h \n wpe.weight p h",
        final="ln_f.[weight|bias] h",
        base="transformer",
        layers="h",
        defaults={"multi_query": True, **TIED},
        dims=lambda config, dims: {
            "groups": 1 if config.flag("multi_query") else dims["heads"],
            "p": config.size("n_positions", "max_position_embeddings", default=1024),
            "c": dims["h"] + 2 * (dims["h"] // dims["heads"] if config.flag("multi_query") else dims["h"]),
        },
        unread=("head_dim", "intermediate_size", "num_key_value_heads"),
        unknown=("add_cross_attention",),
    ),
    "gpt_neo": Family(
        "GPTNeo",
        """
        ln_1.[weight|bias] h
        attn.attention.[k|v|q|out]_proj.weight h h
        attn.attention.out_proj.bias h
        ln_2.[weight|bias] h
        mlp.c_fc.weight f h
        mlp.c_fc.bias f
        mlp.c_proj.weight h f
        mlp.c_proj.bias h
        """,
        top="wte.weight v h \n wpe.weight p h",
        final="ln_f.[weight|bias] h",
        base="transformer",
        layers="h",
        defaults=TIED,
        spelled={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        dims=lambda config, dims: {"p": config.size("max_position_embeddings", default=2048)},
    ),
    "gptj": _GPTJ,
    "codegen": replace(
        _GPTJ,
        stem="CodeGen",
        layer=_GPTJ.layer.replace("[k|v|q|out]_proj.weight h h", "qkv_proj.weight 3h h \n attn.out_proj.weight h h"),
    ),
    "bloom": Family(
        "Bloom",
        """
        input_layernorm.[weight|bias] h
        self_attention.query_key_value.weight 3h h
        self_attention.query_key_value.bias 3h
        self_attention.dense.weight h h
        self_attention.dense.bias h
        post_attention_layernorm.[weight|bias] h
        mlp.dense_h_to_4h.weight 4h h
        mlp.dense_h_to_4h.bias 4h
        mlp.dense_4h_to_h.weight h 4h
        mlp.dense_4h_to_h.bias h
        """,
        top="word_embeddings.weight v h \n word_embeddings_layernorm.[weight|bias] h",
        final="ln_f.[weight|bias] h",
        base="transformer",
        layers="h",
        defaults=TIED,
        spelled={"n_embed": "hidden_size"},
    ),
    "mpt": Family(
        "Mpt",
        """
        norm_1.weight h
        attn.Wqkv.weight 3h h
        attn.out_proj.weight h h
        norm_2.weight h
        ffn.up_proj.weight 4h h
        ffn.down_proj.weight h 4h
        """,
        top="wte.weight v h",
        final="norm_f.weight h",
        base="transformer",
        layers="blocks",
        defaults=TIED,
        spelled={"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    ),
    "biogpt": Family(
        "BioGpt",
        """
        self_attn.[k|v|q|out]_proj.weight h h
        self_attn.[k|v|q|out]_proj.bias h
        self_attn_layer_norm.[weight|bias] h
        fc1.weight f h
        fc1.bias f
        fc2.weight h f
        fc2.bias h
        final_layer_norm.[weight|bias] h
        """,
        top="embed_tokens.weight v h \n embed_positions.weight p h",
        final="layer_norm.[weight|bias] h",
        base="biogpt",
        output="output_projection.weight v h",
        defaults=TIED,
        dims=lambda config, dims: {"p": config.size("max_position_embeddings", default=1024) + 2},
    ),
    "persimmon": Family(
        "Persimmon",
        """
        self_attn.query_key_value.weight 3h h
        self_attn.query_key_value.bias 3h
        self_attn.dense.weight h h
        self_attn.dense.bias h
        self_attn.[q|k]_layernorm.[weight|bias] d ? qk_layernorm
        mlp.dense_h_to_4h.weight f h
        mlp.dense_h_to_4h.bias f
        mlp.dense_4h_to_h.weight h f
        mlp.dense_4h_to_h.bias h
        [input|post_attention]_layernorm.[weight|bias] h
        """,
        final="final_layernorm.[weight|bias] h",
        defaults={"qk_layernorm": True, "intermediate_size": 16384},
        unread=("head_dim",),
    ),
    "mamba": Family(
        "Mamba",
        """
        norm.weight h
        mixer.A_log f n
        mixer.D f
        mixer.conv1d.weight f 1 c
        mixer.conv1d.bias f ? use_conv_bias
        mixer.in_proj.weight 2f h
        mixer.in_proj.bias 2f ? use_bias
        mixer.x_proj.weight x f
        mixer.dt_proj.weight f r
        mixer.dt_proj.bias f
        mixer.out_proj.weight h f
        mixer.out_proj.bias h ? use_bias
        """,
        top="embeddings.weight v h",
        final="norm_f.weight h",
        base="backbone",
        defaults={
            "num_attention_heads": 1,  # it has none
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "time_step_rank": "auto",
            "use_conv_bias": True,
            **TIED,
        },
        dims=_mamba,
    ),
    "minimax": Family(
        "MiniMax",
        """
        self_attn.q_proj.weight a h ? !linear
        self_attn.[k|v]_proj.weight k h ? !linear
        self_attn.o_proj.weight h a ? !linear
        self_attn.slope_rate heads 1 1 ? linear
        self_attn.[query|key]_decay heads b 1 ? linear
        self_attn.diagonal_decay 1 heads b b ? linear
        self_attn.norm.weight a ? linear
        self_attn.qkv_proj.weight 3a h ? linear
        self_attn.out_proj.weight h a ? linear
        self_attn.output_gate.weight a h ? linear
        """
        + NORMS
        + BLOCK_EXPERTS,
        defaults={"intermediate_size": 14336, "num_key_value_heads": 8},
        dims=lambda config, dims: {"b": config.size("block_size", default=256)},
        experts=("num_local_experts", "num_experts"),
        kinds=lambda config, layer: _linear_by_type(config, layer, layer % 2 == 1),
        memory="mlp block_sparse_moe",
    ),
    "gpt_neox": Family(
        "GPTNeoX",
        """
        [input|post_attention]_layernorm.[weight|bias] h
        attention.query_key_value.weight 3h h
        attention.query_key_value.bias 3h ? attention_bias
        attention.dense.weight h h
        attention.dense.bias h ? attention_bias
        mlp.dense_h_to_4h.weight f h
        mlp.dense_h_to_4h.bias f
        mlp.dense_4h_to_h.weight h f
        mlp.dense_4h_to_h.bias h
        """,
        top="embed_in.weight v h",
        final="final_layer_norm.[weight|bias] h",
        base="gpt_neox",
        output="embed_out.weight v h",
        defaults={"attention_bias": True},
        unread=("head_dim", "num_key_value_heads"),
        ignored=(r"(.*\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        memory="^lm_head ^embed_out",
    ),
    "gpt_oss": Family(
        "GptOss",
        _ATTENTION
        + """
        self_attn.sinks heads
        mlp.router.weight e h
        mlp.router.bias e
        mlp.experts.gate_up_proj e h 2f
        mlp.experts.gate_up_proj_bias e 2f
        mlp.experts.down_proj e f h
        mlp.experts.down_proj_bias e h
        """
        + NORMS,
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        absent={"sliding_window": 128},
        dims=_experts,
        experts=("num_local_experts", "num_experts"),
        kinds=_all_sparse,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        stem="DeepseekV2",
        layer=_DEEPSEEK.layer.replace(CORRECTION, "")
        + MLP_BIASES
        + "mlp.shared_experts.[gate|up]_proj.bias s ? sparse mlp_bias \n"
        + "mlp.shared_experts.down_proj.bias h ? sparse mlp_bias",
        prediction="",
    ),
    "deepseek_v3": replace(_DEEPSEEK, absent={"n_group": 8, "topk_group": 4}),
    "kimi_k2": _DEEPSEEK,
    "aria_text": Family(
        "AriaText",
        _ATTENTION
        + """
        mlp.router.weight e h
        mlp.experts.fc1.weight e h 2f
        mlp.experts.fc2.weight e f h
        mlp.shared_experts.[gate|up]_proj.weight s h
        mlp.shared_experts.down_proj.weight h s
        mlp.shared_experts.[gate|up]_proj.bias s ? mlp_bias
        mlp.shared_experts.down_proj.bias h ? mlp_bias
        """
        + NORMS,
        defaults={"intermediate_size": 4096, "moe_num_shared_experts": 2},
        spelled={"moe_topk": "num_experts_per_tok"},
        dims=_experts,
        experts=("moe_num_experts",),
        kinds=_all_sparse,
        memory="""
        mlp.experts.gate_up_proj    mlp.experts.fc1.weight
        mlp.experts.down_proj       mlp.experts.fc2.weight
        """,
    ),
    "olmo": Family("Olmo", _ATTENTION + MLP, final=""),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, stem="Olmo3"),
    "olmoe": Family(
        "Olmoe",
        _ATTENTION + "self_attn.q_norm.weight h \n self_attn.k_norm.weight hk \n" + GATE + ROUTED + NORMS,
        dims=lambda config, dims: {**_experts(config, dims), "hk": dims["h"] // dims["heads"] * dims["groups"]},
        experts=("num_experts",),
        kinds=_all_sparse,
    ),
    "starcoder2": Family(
        "Starcoder2",
        _ATTENTION.replace("attention_bias", "use_bias")
        + """
        mlp.c_fc.weight f h
        mlp.c_fc.bias f ? use_bias
        mlp.c_proj.weight h f
        mlp.c_proj.bias h ? use_bias
        """
        + NORMS
        + NORM_BIASES,
        final=NORM_WITH_BIAS,
        defaults={"use_bias": True, **TIED},
    ),
    "stablelm": Family(
        "StableLm",
        QKVO
        + BIASES.replace("attention_bias", "use_qkv_bias")
        + "self_attn.[q|k]_layernorm.norms.{e}.weight d ? qk_layernorm"
        + MLP
        + """
        input_layernorm.[weight|bias] h
        post_attention_layernorm.[weight|bias] h ? !use_parallel_residual
        """,
        final=NORM_WITH_BIAS,
        unread=("head_dim",),
        unknown=("qk_layernorm",),
    ),
    "cohere": Family(
        "Cohere",
        _ATTENTION
        + MLP
        + """
        input_layernorm.weight h
        self_attn.q_norm.weight heads d ? use_qk_norm
        self_attn.k_norm.weight groups d ? use_qk_norm
        """,
        defaults=TIED,
    ),
    "cohere2": Family("Cohere2", _ATTENTION + MLP + "input_layernorm.weight h", defaults=TIED),
    "granite": replace(_LLAMA, stem="Granite"),
    "granitemoe": Family(
        "GraniteMoe",
        _ATTENTION
        + NORMS
        + """
        block_sparse_moe.router.layer.weight e h
        block_sparse_moe.input_linear.weight e 2f h
        block_sparse_moe.output_linear.weight e h f
        """,
        experts=("num_local_experts",),
        memory="""
        block_sparse_moe.experts.gate_up_proj    block_sparse_moe.input_linear.weight
        block_sparse_moe.experts.down_proj       block_sparse_moe.output_linear.weight
        block_sparse_moe.router.weight           block_sparse_moe.router.layer.weight
        """,
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, stem="Glm4", layer=_GLM.layer + "post_[self_attn|mlp]_layernorm.weight h"),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": replace(
        _DEEPSEEK,
        stem="Glm4MoeLite",
        kinds=_by_mlp_type,
    ),
    "solar_open": replace(
        _GLM4_MOE,
        stem="SolarOpen",
        layer=QKVO + BIASES + EXPERTS + SHARED_EXPERTS + CORRECTION + NORMS,
        defaults={"head_dim": 128},
        kinds=_all_sparse,
        prediction="",
    ),
    "dots1": replace(
        _GLM4_MOE,
        stem="Dots1",
        layer=_ATTENTION + HEAD_NORMS + MLP + EXPERTS + SHARED_EXPERTS + CORRECTION + NORMS,
        prediction="",
    ),
    "exaone_moe": Family(
        "ExaoneMoe",
        QKVO + HEAD_NORMS + MLP + EXPERTS + SHARED_EXPERTS + CORRECTION.replace("mlp.gate.", "mlp.") + NORMS,
        spelled={"num_shared_experts": "n_shared_experts"},
        absent={"sliding_window": 4096},
        dims=_experts,
        experts=("num_experts",),
        kinds=_by_mlp_type,
        ignored=(r"mtp.*",),
        memory="mlp.gate.e_score_correction_bias mlp.e_score_correction_bias",
    ),
    "hy_v3": Family(
        "HYV3",
        _ATTENTION
        + HEAD_NORMS
        + MLP
        + MLP_BIASES
        + GATE.replace("mlp.gate.", "mlp.router.gate.")
        + ROUTED
        + """
        mlp.expert_bias e ? sparse
        mlp.shared_mlp.[gate|up]_proj.weight s h ? sparse
        mlp.shared_mlp.down_proj.weight h s ? sparse
        mlp.shared_mlp.[gate|up]_proj.bias s ? sparse mlp_bias
        mlp.shared_mlp.down_proj.bias h ? sparse mlp_bias
        """
        + NORMS,
        defaults={"head_dim": 128},
        spelled={"num_shared_experts": "n_shared_experts", "router_scaling_factor": "routed_scaling_factor"},
        dims=_experts,
        experts=("num_experts",),
        kinds=_by_mlp_type,
        prediction="[enorm|hnorm|final_layernorm].weight h \n eh_proj.weight h 2h",
        memory="""
        mlp.gate.weight                 mlp.router.gate.weight
        mlp.e_score_correction_bias     mlp.expert_bias
        mlp.shared_experts              mlp.shared_mlp
        """,
    ),
    "flint": Family(
        "Flint",
        _ATTENTION
        + HEAD_NORMS
        + "self_attn.softmax_offset heads \n"
        + MLP
        + EXPERTS
        + GATED_SHARED_EXPERT.replace("mlp.shared_expert_gate.weight 1 h ? sparse", "")
        + NORMS,
        defaults={"head_dim": 128, "mlp_only_layers": [0, 1]},
        dims=_experts,
        experts=("num_experts",),
        kinds=_by_step,
        memory="self_attn.sinks self_attn.softmax_offset",
    ),
    "youtu": Family(
        "Youtu",
        LATENT + MLP + NORMS,
        defaults=TIED,
        spelled={"v_head_dim": "head_dim"},
        unread=("num_key_value_heads",),
        dims=_latent,
    ),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "chatglm": Family(
        "ChatGLM",
        """
        input_layernorm.weight h
        self_attention.query_key_value.weight qkv h
        self_attention.query_key_value.bias qkv ? add_qkv_bias
        self_attention.dense.weight h a
        post_attention_layernorm.weight h
        mlp.dense_h_to_4h.weight 2f h
        mlp.dense_4h_to_h.weight h f
        """,
        top="embedding.word_embeddings.weight v h",
        final="encoder.final_layernorm.weight h",
        base="transformer",
        layers="encoder.layers",
        causal="ForConditionalGeneration",
        output="transformer.output_layer.weight v h",
        spelled={
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "kv_channels": "head_dim",
            "ffn_hidden_size": "intermediate_size",
            "multi_query_group_num": "num_key_value_heads",
            "layernorm_epsilon": "rms_norm_eps",
            "seq_length": "max_position_embeddings",
        },
        dims=lambda config, dims: {"qkv": dims["a"] + 2 * dims["k"]},
        unknown=("add_bias_linear",),
        ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
        own_code=True,
    ),
    "megatron-bert": Family(
        "MegatronBert",
        """
        attention.ln.[weight|bias] h
        attention.self.[query|key|value].weight h h
        attention.self.[query|key|value].bias h
        attention.output.dense.weight h h
        attention.output.dense.bias h
        ln.[weight|bias] h
        intermediate.dense.weight f h
        intermediate.dense.bias f
        output.dense.weight h f
        output.dense.bias h
        """,
        top="""
        embeddings.word_embeddings.weight v h
        embeddings.position_embeddings.weight p h
        embeddings.token_type_embeddings.weight t h
        """,
        final="""
        encoder.ln.[weight|bias] h
        pooler.dense.weight h h
        pooler.dense.bias h
        """,
        base="bert",
        layers="encoder.layer",
        causal="ForPreTraining",
        output="""
        cls.predictions.bias v
        cls.predictions.transform.dense.weight h h
        cls.predictions.transform.dense.bias h
        cls.predictions.transform.LayerNorm.[weight|bias] h
        cls.predictions.decoder.weight v h
        cls.predictions.decoder.bias v ? !tie_word_embeddings
        cls.seq_relationship.weight 2 h
        cls.seq_relationship.bias 2
        """,
        classifier="classifier.weight labels h \n classifier.bias labels",
        defaults={
            "vocab_size": 29056,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            **TIED,
        },
        dims=lambda config, dims: {
            "p": config.size("max_position_embeddings", default=512),
            "t": config.size("type_vocab_size", default=2),
        },
        unread=("head_dim", "num_key_value_heads"),
        unknown=("add_cross_attention",),
        ignored=(r"bert\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    ),
    "smollm3": replace(_LLAMA, stem="SmolLM3", defaults=TIED),
    "arcee": replace(_LLAMA, stem="Arcee", layer=_ATTENTION + UP_DOWN + NORMS),
    "nemotron": _NEMOTRON,
    "jais2": replace(_NEMOTRON, stem="Jais2", defaults={"attention_bias": True, "mlp_bias": True}),
    "cwm": replace(
        _LLAMA,
        stem="Cwm",
        layer=QKVO + MLP + MLP_BIASES + NORMS,
        defaults={
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        absent={"sliding_window": 8192},
    ),
    "internlm3": replace(
        _LLAMA, defaults={"head_dim": 128}, spelled={"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    ),
    "baichuan": Family(
        "BaiChuan",
        "self_attn.W_pack.weight 3a h \n self_attn.o_proj.weight h a" + MLP + NORMS,
        unread=("num_key_value_heads",),
        own_code=True,
    ),
    "exaone": Family(
        "Exaone",
        """
        ln_1.weight h
        attn.attention.q_proj.weight a h
        attn.attention.[k|v]_proj.weight k h
        attn.attention.out_proj.weight h a
        ln_2.weight h
        mlp.c_fc_[0|1].weight f h
        mlp.c_proj.weight h f
        """,
        top="wte.weight v h",
        final="ln_f.weight h",
        base="transformer",
        layers="h",
        defaults=TIED,
        spelled={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        own_code=True,
    ),
    "iquestcoder": replace(_LLAMA, defaults={"head_dim": 128}),
    "helium": Family(
        "Helium", QKVO.replace("h a", "h h") + BIASES + MLP + MLP_BIASES + NORMS, defaults={"head_dim": 128}
    ),
    "seed_oss": replace(
        _LLAMA,
        stem="SeedOss",
        layer=QKVO + BIASES + OUT_BIAS.replace("attention_bias", "attention_out_bias") + MLP + MLP_BIASES + NORMS,
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "exaone4": Family("Exaone4", QKVO + HEAD_NORMS + MLP + AFTER_NORMS),
    "minimax_m2": Family(
        "MiniMaxM2",
        QKVO + WHOLE_NORMS + BLOCK_EXPERTS + "block_sparse_moe.e_score_correction_bias e \n" + NORMS,
        defaults={"head_dim": 128},
        experts=("num_local_experts",),
        memory="mlp block_sparse_moe",
    ),
    "ernie4_5": replace(
        _LLAMA,
        stem="Ernie4_5",
        layer=_LLAMA.layer.replace("attention_bias", "use_bias").replace("mlp_bias", "use_bias"),
        defaults={"head_dim": 128, **TIED},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe",
        (
            QKVO
            + MLP
            + GATE
            + ROUTED
            + SHARED_EXPERTS
            + NORMS
            + "mlp.moe_statics.e_score_correction_bias 1 e ? sparse \n"
        ),
        defaults={"moe_layer_start_index": 1, **TIED},
        dims=_experts,
        experts=("moe_num_experts",),
        kinds=_ernie,
        unknown=("use_bias",),
        ignored=(r".*mtp.*",),
        memory="mlp.gate.moe_statics.e_score_correction_bias mlp.moe_statics.e_score_correction_bias",
    ),
    "llama4_text": Family(
        "Llama4",
        _ATTENTION
        + """
        feed_forward.experts.gate_up_proj e h 2f ? sparse
        feed_forward.experts.down_proj e f h ? sparse
        feed_forward.router.weight e h ? sparse
        feed_forward.shared_expert.[gate|up]_proj.weight f h ? sparse
        feed_forward.shared_expert.down_proj.weight h f ? sparse
        feed_forward.[gate|up]_proj.weight fd h ? !sparse
        feed_forward.down_proj.weight h fd ? !sparse
        """
        + NORMS,
        defaults={"head_dim": 128},
        dims=lambda config, dims: {"fd": config.size("intermediate_size_mlp", "intermediate_size")},
        experts=("num_local_experts",),
        kinds=_llama4,
    ),
}


def saved(config: Mapping[str, Any]) -> Saved | None:
    """Return the tensors saved by the config's class. None without a table for it."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    named = architectures(config)
    return family.saved(config, named[0] if named else family.stem + family.causal)


def saved_of(checkpoint: Checkpoint, names: str, model_types: Collection[str]) -> Saved:
    """Return the tensors saved by the config's class. Raise UsageError unless it is a causal model of `model_types`."""
    config = checkpoint.config or {}
    found = saved(config) if config.get("model_type") in model_types else None
    if found is None:
        raise UsageError(
            f"there is no mapping between {names} and the Hub's for this architecture",
            path=checkpoint.path,
            expected="a causal model: " + ", ".join(model_types),
            found=f"model_type {config.get('model_type')!r}",
        )
    return found


def knows_class(cls: str) -> bool:
    heads = ("ForSequenceClassification", "Model")
    return any(cls in (one.stem + head for head in (one.causal, *heads)) for one in FAMILIES.values())
