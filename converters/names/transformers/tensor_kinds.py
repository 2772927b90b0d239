"""Buffers of transformers' models, and tensors that their classes keep in float32.

From transformers 5.23, `modeling_*.py`: `register_buffer`, parameters created in float32, and
`_keep_in_fp32_modules_strict` (in bf16 and fp16) and `_keep_in_fp32_modules` (in fp16). Patterns match in-memory names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import HUB, Checkpoint
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, DType
from ckpt.plan.namespace import OF_THE_MODEL, TORCHTITAN
from converters.names.families.composites import COMPOSITES
from converters.names.families.tables import FAMILIES
from converters.names.transformers.relation import relation
from converters.names.transformers.tables import PARTS, RULES, UNCHANGED
from converters.names.transformers.transformers_source import model_types

_Rows = Mapping[str, str]  # pattern: model types

#: torch's BatchNorm, in any model.
_ANY_MODEL = r"\.running_(mean|var)$"
_TORCHTITAN = r"\bmoe\.expert_bias(_E)?$"
_CORRECTED = """
    axk1 axk2 bailing_hybrid beam deepseek_v3 deepseek_v32 deepseek_v4 dots1 dots3_note dots3_note_text exaone_moe
    glm4_moe glm4_moe_lite glm4v_moe glm4v_moe_text glm5_next glm5_next_text glm_moe_dsa hy_v3 hy_v4 inkling2
    inkling2_text inkling_mm_model inkling_text kimi_k25 kolibri1 mimo_v2_flash muse_spark muse_spark_text
    nemo_speechlm nemotron_h nemotron_h_omni solar_open
"""
_CORRECTION = r"e_score_correction_bias"

#: Floating-point buffers in state dicts.
BUFFERS: _Rows = {
    _CORRECTION: f"{_CORRECTED} kimi_linear longcat_flash minimax_m2 minimax_m3_vl minimax_m3_vl_text step3p7",
    r"expert_bias": "lfm2_moe",
    r"balancing_biases": "zaya",
    r"(backbone|conv_encoder)\.model\..*normalization\.(weight|bias)$": (
        "d_fine deimv2 pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2"
    ),
    r"text_model\.embeddings\.position_embedding$": "videoprism",
    r"act_fn\.(beta|eps)$": "apertus",
    r"codebook\.(cluster_size|embed|embed_avg|inited)$": "bark encodec xcodec",
    r"codebook\.(cluster_usage|embed_sum|initialized)$": "csm kyutai_speech_to_text mimi",
    r"layer_scalar": """
        diffusion_gemma embedding_gemma2 embedding_gemma2_text gemma4 gemma4_text gemma4_unified gemma4_unified_text
    """,
    r"(input|output)_(min|max)$": "gemma4_audio",
    r"(act_scaling_factor|x_min|x_max|_integer|(fc|weight)_scaling_factor|LayerNorm\.shift)$": "ibert",
    r"num_points_scale": "d_fine deimv2",
    r"n_points_scale": "rt_detr_v2",
    r"global_(invstd|mean)$": "phi4_multimodal",
    r"final_logits_bias": "led marian",
    r"latent_(mean|std)|\bfreqs$": "gradium_phonon_tts pocket_tts",
    r"norm_(mean|std)$": "radio",
    r"rotary_emb\.alpha": "mistral_large4 mistral_large4_text",
    r"inv_freq": "bros clvp evolla",
    r"self_attn\.(slope_rate|(query|key|diagonal)_decay)": "minimax",
    r"pos_idx_to_embed": "florence2",
    r"vocoder\.(mean|scale)$": "fastspeech2_conformer_with_hifigan",
    r"shared_(image_)?embedding\.positional_embedding": (
        "edgetam_video sam2 sam2_video sam3_tracker sam3_tracker_video sam3_video"
    ),
}

_MUSE = "muse_spark muse_spark_text"
_INKLING, _INKLING2 = "inkling_mm_model inkling_text", "inkling2 inkling2_text"
_GLM5 = "glm5_next glm5_next_text"
#: Kept in float32 in a bf16 or fp16 model.
FLOAT32: _Rows = {
    _CORRECTION: f"{_CORRECTED} kimi_k2",
    r"gate\.weight": "ernie4_5_moe ernie4_5_vl_moe flint",
    r"moe_statics": "ernie4_5_moe ernie4_5_vl_moe",
    r"mlp\.gate\.weight": f"beam {_INKLING2} mistral_large4 mistral_large4_text {_MUSE}",
    r"sinks": "deepseek_v4 flint hy_v4 openai_privacy_filter",
    r"A_log": f"bailing_hybrid {_GLM5} olmo_hybrid zamba",
    r"conv1d|dt_bias": f"bailing_hybrid {_GLM5}",
    r"(attn|ffn)_hc\.(base|scale)": _GLM5,
    r"attn_hc|ffn_hc|hc_head|position_bias|norm|input_layernorm|post_attention_layernorm": "deepseek_v4",
    r"gate\.wg\.weight": "hunyuan_v1_moe",
    r"base|fn|hc_base|hc_fn|hc_scale|k_norm|lm_head|scale|weights_proj": "hy_v4",
    r"(attn|k|v|mlp)_sconv|gate\.global_scale": _INKLING,
    r"(attention|final|mlp)_input|[kv]_sconv\.conv1d|post_(attention|mlp)_convolution": _INKLING2,
    r"post_(attention|feedforward)_residual_gate": _MUSE,
    r"rotary_emb": "mistral_large4 mistral_large4_text",
    r"conv\.norm": "granite_speech5_ctc granite_speech5_encoder",
    r"latent_mean|latent_std|freqs": "gradium_phonon_tts pocket_tts",
    r"audio_tower|multi_modal_projector": "nemo_speechlm",
    r"codec_model": "kyutai_speech_to_text",
    r"embed_positions": "voxtral",
    r"structure_(attention_cell|generator)": "slanext",
    r"rel_attn\.(q|k|v|o|r|r_[rsw]_bias|seg_embed)$|mask_emb": "xlnet",
    r"self\.[qv]_bias": "deberta",
    r"position_embeddings\.weights": "reformer",
    r"token2wav": "qwen2_5_omni",
}
#: Kept in float32 in an fp16 model.
FLOAT32_IN_FP16: _Rows = {
    r"input_layernorm|post_attention_layernorm|norm": "gpt_oss",
    r"expert_bias|input_layernorm|norm|(k|q)_norm|post_attention_layernorm|(pre|post)_mlp_layernorm": "afmoe",
    r"indexer\.weights_proj": "axk2 deepseek_v32 glm_moe_dsa mistral_large4 mistral_large4_text",
    r"self_attn\.compressor\.(indexer\.)?(gate|kv)_proj|compressor\.indexer\.scorer\.weights_proj": "deepseek_v4",
    r"classifier\.weight": "longcat_flash",
    r"qformer": "blip-2",
    r"query_tokens": "blip-2 instructblip instructblipvideo",
    r"time_decay|time_first": "rwkv",
    r"wo": "mt5 pop2piano t5 udop umt5",
}


def is_known(checkpoint: Checkpoint) -> bool:
    """Return True if the tables have all buffers of the config's model and inner models."""
    types = list(model_types(checkpoint.config or {}))
    listed = " ".join((*BUFFERS.values(), *FLOAT32.values(), *FLOAT32_IN_FP16.values())).split()
    own_code = {name for name, family in FAMILIES.items() if family.own_code} | {"kimi_k2"}
    known = {*RULES, *PARTS, *UNCHANGED, *FAMILIES, *COMPOSITES, *listed} - own_code
    return bool(types) and known.issuperset(types)


def buffers(checkpoint: Checkpoint) -> frozenset[str]:
    found = _matching(checkpoint, _patterns(checkpoint, BUFFERS)) | _found(checkpoint, [_ANY_MODEL])
    return found | (_found(checkpoint, [_TORCHTITAN]) if checkpoint.namespace == TORCHTITAN else frozenset())


def float32(checkpoint: Checkpoint, dtype: DType) -> frozenset[str]:
    """Return the tensors that the model's class keeps in float32 if the model is loaded in `dtype`."""
    found = _patterns(checkpoint, FLOAT32) if dtype in (BFLOAT16, FLOAT16) else []
    found += _patterns(checkpoint, FLOAT32_IN_FP16) if dtype == FLOAT16 else []
    return _matching(checkpoint, found)


def _patterns(checkpoint: Checkpoint, rows: _Rows) -> list[str]:
    types = set(model_types(checkpoint.config or {})) if checkpoint.namespace in OF_THE_MODEL else set()
    return [pattern for pattern, listed in rows.items() if not types.isdisjoint(listed.split())]


def _matching(checkpoint: Checkpoint, patterns: Sequence[str]) -> frozenset[str]:
    if not patterns or checkpoint.namespace != HUB:
        return _found(checkpoint, patterns)
    try:
        related = relation(checkpoint.config, checkpoint.shapes, "to_memory")
    except CkptError:  # names of another release
        related = None
    pattern = _pattern_of(patterns)
    renamed = {link.a for link in related.links if pattern.search(link.b)} if related else set()
    return _found(checkpoint, patterns) | renamed


def _found(checkpoint: Checkpoint, patterns: Sequence[str]) -> frozenset[str]:
    pattern = _pattern_of(patterns)
    return frozenset(fqn for fqn, _ in checkpoint.tensors if patterns and pattern.search(fqn))


def _pattern_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
