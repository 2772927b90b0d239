"""Differences between in-memory names and the Hub's, by model type.

Types with a family or a composite have no entry here: their tables say it. The entries follow `conversion_mapping.py`
in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt.plan.namespace import config_parts
from converters.names.families.composites import COMPOSITES, Composite
from converters.names.families.rows import Family, lines, parse
from converters.names.families.tables import FAMILIES
from converters.names.transformers.rules import NameRule, Rules, exchanged, joined, read_as, rename, stacked
from converters.names.transformers.transformers_source import is_base_model, model_types


def _words(text: str) -> list[str]:
    return text.split()


def _experts(inside: str, *hub: str) -> tuple[NameRule, ...]:
    """Return rules for experts, in memory two tensors per layer: `down_proj`, and gate and up."""
    *parts, down = (f"{inside}.experts.*.{name}.weight" for name in hub)
    joined = "gate_up_proj" if len(parts) > 1 else "up_proj"
    return stacked(f"{inside}.experts.{joined}", *parts), stacked(f"{inside}.experts.down_proj", down)


_QWEN = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_BLOCK = (rename("mlp", "block_sparse_moe"),)
_FORGET_GATE = tuple(
    rename(f"self_attn.forget_gate.{name}", f"self_attn.{name}")
    for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
)


def _renames(rows: str) -> tuple[NameRule, ...]:
    """Return the rules in a family's `memory` rows."""
    return tuple(NameRule(memory, (hub,), read=bool(read)) for memory, hub, *read in map(str.split, lines(rows)))


def _attention(hub: str) -> tuple[NameRule, ...]:
    """Return rules for an image encoder's attention, with its projections under `hub` in files."""
    words = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    names = (rename(f"attention.{memory}", f"attention.{hub}.{word}") for memory, word in words.items())
    return (*names, rename("attention.o_proj", "attention.output.dense"))


def _convolution(inside: str) -> NameRule:
    return joined(f"{inside}.conv1d.weight", *(f"{inside}.{which}_conv1d.weight" for which in "qkv"))


def _top_level_rules(*others: str) -> tuple[NameRule, ...]:
    """Return rules for a language model and `others` at the top on the Hub."""
    return (
        rename("^lm_head", "^language_model.lm_head"),
        rename("^model.language_model", "^language_model.model"),
        *(rename(f"^model.{other}", f"^{other}") for other in others),
    )


def _inner_model_rules(**others: str) -> tuple[NameRule, ...]:
    """Return rules for a language model called `model` on the Hub, beside `others`."""
    return (
        rename("^model.language_model", "^model"),
        *(rename(f"^model.{other}", f"^{hub}") for other, hub in others.items()),
    )


_LLAVA = _top_level_rules("vision_tower", "multi_modal_projector")
_OMNI = _inner_model_rules(visual="visual", audio_tower="audio_tower")
_MLP = (rename("mlp.fc1", "intermediate.dense"), rename("mlp.fc2", "output.dense"))
_COSMOS3 = tuple(
    rename(f"self_attn.{memory}", f"self_attn.{hub}")
    for memory, hub in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("o_proj", "to_out"))
)
_COSMOS3_TEXT = tuple(
    rename(f"^model.language_model.{name}", f"^{name}") for name in ("embed_tokens", "norm", "layers")
)

#: Models without a table, and one whose files may have experts in two layouts.
RULES: Mapping[str, tuple[NameRule, ...]] = {
    **dict.fromkeys(
        _words(
            """
        afmoe beam cohere2_moe deepseek_v32 flex_olmo glm_moe_dsa hunyuan_v1_moe longcat_flash mellum
"""
        ),
        _QWEN,
    ),
    "gemma3n_text": (read_as("^model", "^model.language_model"),),
    "qwen3_vl_moe": (
        exchanged("mlp.experts.gate_up_proj", hidden=2),
        exchanged("mlp.experts.down_proj", hidden=1),
    ),
    "axk1": (*_QWEN, rename("mlp.post_mlp_layernorm", "post_mlp_layernorm")),
    "axk2": (
        *_QWEN,
        rename("mlp.fc1", "W_down"),
        rename("mlp.fc2", "W_up"),
        rename("self_attn.q_gate_proj", "self_attn.q_b_proj"),
    ),
    "bailing_hybrid": (
        *_QWEN,
        rename("^model.embed_tokens", "^model.word_embeddings"),
        rename("self_attn", "attention"),
        *(rename(f"self_attn.forget_gate.{name}", f"self_attn.{name}") for name in ("f_proj", "dt_bias", "A_log")),
        _convolution("self_attn"),
        rename("self_attn.o_proj", "self_attn.dense"),
        rename("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
    ),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), _renames(FAMILIES["granitemoe"].memory)),
    "jamba": _experts("feed_forward", "gate_proj", "up_proj", "down_proj"),
    "kimi_linear": (*_FORGET_GATE, _convolution("self_attn"), *_BLOCK, *_experts("mlp", "w1", "w3", "w2")),
    "kolibri1": (
        *_QWEN,
        rename("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"),
        rename("post_self_attn_layernorm", "post_attn_norm"),
        rename("post_mlp_layernorm", "post_ffn_norm"),
    ),
    "laguna": (
        *_QWEN,
        rename("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),
        rename("mlp.shared_experts", "mlp.shared_expert"),
    ),
    "lfm2_moe": _experts("feed_forward", "w1", "w3", "w2"),
    "lfm3": (rename("self_attn.g_proj", "self_attn.gate_proj"),),
    "mimo_v2_flash": (*_QWEN, rename("self_attn.sinks", "self_attn.attention_sink_bias")),
    "olmo_hybrid": (
        rename("input_layernorm", "attention_layer_norm"),
        rename("post_attention_layernorm", "feedforward_layer_norm"),
        _convolution("linear_attn"),
    ),
    "vit": (rename("layers", "encoder.layer"), *_attention("attention"), *_MLP),
    "dinov2": _attention("attention"),
    "swin": (
        rename(
            "attention.relative_position_bias.relative_position_bias_table",
            "attention.self.relative_position_bias_table",
        ),
        *_attention("self"),
        *_MLP,
    ),
    # models with images
    **dict.fromkeys(_words("aria aya_vision got_ocr2 paligemma pp_chart2table vipllava"), _LLAVA),
    "llava_next_video": (*_LLAVA, rename("^model.image_newline", "^image_newline")),
    "cosmos3_edge": (*_COSMOS3_TEXT, *_COSMOS3, rename("mlp.fc1", "mlp.up_proj"), rename("mlp.fc2", "mlp.down_proj")),
    "cosmos3_omni": (
        *_COSMOS3_TEXT,
        *(
            rename(f"^model.visual.{name}", f"^{name}")
            for name in ("blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list")
        ),
        *_COSMOS3,
        rename("self_attn.q_norm", "self_attn.norm_q"),
        rename("self_attn.k_norm", "self_attn.norm_k"),
    ),
    "fuyu": _top_level_rules("vision_embed_tokens"),
    "gemma4_unified": (
        *(
            rename(f"embed_vision.{name}", f"vision_embedder.{name}")
            for name in ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
        ),
        rename("embed_vision.multimodal_embedder.embedding_projection", "embed_vision.embedding_projection"),
    ),
    "hyperclovax_vision_v2": (
        rename("^lm_head", "^model.language_model.lm_head"),
        rename("^model.projector", "^model.vision_projector"),
        read_as("^model.language_model", "^model.language_model.model"),
    ),
    "lfm3_vl": (
        rename("vision_tower.patch_embed", "vision_tower.patchifier"),
        rename("q_norm", "q_layernorm").within("vision_tower"),
        rename("k_norm", "k_layernorm").within("vision_tower"),
    ),
    "minimax_m3_vl": (
        *_top_level_rules("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
        rename("^model.multi_modal_projector.merge_linear_1", "^patch_merge_mlp.linear_1"),
        rename("^model.multi_modal_projector.merge_linear_2", "^patch_merge_mlp.linear_2"),
        rename("^model.vision_tower.embeddings.proj", "^vision_tower.vision_model.embeddings.patch_embedding"),
        rename("^model.vision_tower.layers", "^vision_tower.vision_model.encoder.layers"),
        rename("^model.vision_tower.pre_layrnorm", "^vision_tower.vision_model.pre_layrnorm"),
        *(rename(f"mlp.{name}", f"block_sparse_moe.{name}") for name in ("experts", "gate", "shared_experts")),
        rename("mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
        *(
            rename(f"self_attn.indexer.{name}", f"self_attn.index_{name}")
            for name in ("q_proj", "k_proj", "q_norm", "k_norm")
        ),
        *_experts("mlp", "w1", "w3", "w2"),
        joined("gate_up_proj.weight", "gate_proj.weight", "up_proj.weight"),
    ),
    "mllama": _top_level_rules("vision_model", "multi_modal_projector"),
    "paddleocr_vl": _inner_model_rules(visual="visual", projector="mlp_AR"),
    "qwen2_5_omni_thinker": (read_as("", "^thinker"), *_OMNI),
    "qwen3_omni_moe_thinker": (read_as("", "^thinker"), *_OMNI, *_QWEN),
    "video_llava": _top_level_rules("image_tower", "video_tower", "multi_modal_projector"),
}

#: Names found only in old files, for any model.
LEGACY = (read_as("LayerNorm.weight", "LayerNorm.gamma"), read_as("LayerNorm.bias", "LayerNorm.beta"))

#: Without a family, with equal names on both sides.
UNCHANGED = frozenset(
    _words(
        """
    apertus bamba bart bert bert-generation big_bird bigbird_pegasus bitnet blenderbot blenderbot-small blip blip-2
    camembert cpmant ctrl data2vec-text diffllama doge electra ernie exaone4_5 falcon falcon_h1 falcon_mamba
    gemma4_unified_text git glm46v glm4v glm_ocr glmga gpt_neox_japanese granite_swa granitemoe_swa hunyuan_v1_dense
    hyperclovax idefics idefics2 idefics3 inkling_text instructblip instructblipvideo jetmoe kosmos-2 kosmos-2.5
    lfm2 lighton_ocr llama4 mamba2 marian mbart minicpm3 minimax_m3_vl_text mistral4 modernbert-decoder moshi
    moss_transcribe_diarize mvp nanochat openai-gpt opt ovis2 pegasus phi4_multimodal pix2struct plbart
    pp_formulanet prophetnet recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv
    smolvlm trocr udop vaultgemma video_llama_3 whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba
    zamba2 zaya
    cohere2_vision deepseek_vl deepseek_vl_hybrid lfm2_vl minicpm_ocr minicpmv4_6 minicpmv4_7
"""
    )
)

#: Models that only occur inside others. The whole model gives them their names.
PARTS: Mapping[str, tuple[NameRule, ...]] = {
    **{part: () for one in COMPOSITES.values() for part in (*one.towers, *(one.texts.keys() - FAMILIES.keys()))},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ()),
    **dict.fromkeys(
        _words(
            """
        blip_2_qformer blip_2_vision_model blip_text_model blip_vision_model cosmos3_edge_text cosmos3_edge_vision
        exaone4_5_vision gemma4_vision git_vision_model glm4v_text glm4v_vision glm_ocr_text glm_ocr_vision
        got_ocr2_vision idefics2_perceiver idefics2_vision idefics3_vision idefics_perciever idefics_vision
        instructblip_qformer instructblip_vision_model instructblipvideo_qformer instructblipvideo_vision_model
        kosmos_2_5_text_model kosmos_2_5_vision_model kosmos_2_text_model kosmos_2_vision_model lfm3_vl_vision
        llama4_vision_model mimi minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision mllama_text_model
        mllama_vision_model moshi_depth moss_transcribe_diarize_audio ovis2_vision paddleocr_vl_text
        paddleocr_vl_vision phi4_multimodal_audio phi4_multimodal_vision pix2struct_text_model pix2struct_vision_model
        pp_chart2table_vision pp_formulanet_text pp_formulanet_vision sam_vision_model smolvlm_vision
        video_llama_3_vision minimax_m3_vl_vision qwen2_5_omni_audio_encoder qwen2_5_omni_text
        qwen2_5_omni_vision_encoder qwen3_omni_moe_audio_encoder qwen3_omni_moe_text qwen3_omni_moe_vision_encoder
"""
        ),
        (),
    ),
    "lfm3": (rename("self_attn.g_proj", "self_attn.gate_proj").within("language_model"),),
    "clip_vision_model": tuple(
        rename(tower, f"{tower}.vision_model") for tower in ("vision_tower", "image_tower", "video_tower")
    ),
    **dict.fromkeys(
        ("siglip2_vision_model", "siglip_vision_model"),
        tuple(
            rename(tower, f"{tower}.vision_model") for tower in ("vision_tower", "^model.vision_model", "^vision_model")
        ),
    ),
}

#: Image encoders with rules for usual classes and MLPs.
_IMAGES = ("vit", "dinov2", "swin")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def rules_of(model_type: str) -> tuple[NameRule, ...] | None:
    """Return a model type's rules, also those from its tables. None if it is unknown."""
    own = RULES.get(model_type, () if model_type in UNCHANGED else None)
    if (composite := COMPOSITES.get(model_type)) is not None:
        return (*_around_text(composite), *(own or ()))
    family = FAMILIES.get(model_type)
    return own if family is None or family.own_code else (*(own or ()), *family_rules(family))


def family_rules(family: Family) -> tuple[NameRule, ...]:
    """Return the rules for a family's `memory` rows and for its stacked experts."""
    return (*_renames(family.memory), *_stacks(family))


def _stacks(family: Family) -> Iterator[NameRule]:
    in_memory = {rule.hub[0]: rule.memory for rule in _renames(family.memory)}
    blocks: dict[str, list[str]] = {}
    for row in parse(family.layer):
        block, is_expert, name = row.name.partition(".experts.{e}.")
        if is_expert:
            blocks.setdefault(in_memory.get(block, block), []).append(name.removesuffix(".weight"))
    for block, names in blocks.items():
        yield from _experts(block, *names)


def _around_text(composite: Composite) -> Iterator[NameRule]:
    """Yield the rules of a vision-language model. In memory, all but the output layer is inside `model`."""
    for memory, hub in composite.prefixes:
        if memory != hub:
            yield rename(f"^{memory}", f"^{hub}")
    for kind, family in composite.texts.items():
        if kind in PARTS:
            yield from _stacks(family)


def declared(config: Mapping[str, Any]) -> Rules | None:
    """Return the rules for this config. None unless the tables have the model and all inner models."""
    types = list(dict.fromkeys(model_types(config)))
    whole = config.get("model_type")
    own = rules_of(whole) if isinstance(whole, str) else None
    if own is None:
        return None
    rules = [*own]
    if is_base_model(config) and any(rule.memory.startswith("^") for rule in rules):
        return None  # its names begin differently
    if whole in _IMAGES and (config.get("use_swiglu_ffn") or str(config.get("architectures")).endswith("Backbone']")):
        return None  # further differences
    has_text = any(rule.memory == "^model.language_model" for rule in rules)
    for part in types[1:]:
        inner = PARTS.get(part, rules_of(part))
        if inner is None or (inner and part not in PARTS and not has_text):
            return None
        inner = inner if part in PARTS else tuple(rule.within("language_model") for rule in inner)
        rules += inner
    hidden = config_parts(config)[-1].get("hidden_size")
    layers, experts = _config_values(config, ("num_hidden_layers",)), _config_values(config, _NUM_EXPERTS)
    if _config_values(config, ("zero_expert_num",)):
        experts = set()  # LongCat: some matrices have more experts than others
    return Rules(
        (*rules, *LEGACY),
        num_layers=max(layers, default=None),
        num_experts=experts.pop() if len(experts) == 1 else None,
        hidden_size=hidden if isinstance(hidden, int) else None,
    )


def _config_values(config: Mapping[str, Any], keys: Collection[str]) -> set[int]:
    own = {value for key in keys if isinstance(value := config.get(key), int)}
    return own.union(*(_config_values(inner, keys) for inner in config.values() if isinstance(inner, Mapping)))
