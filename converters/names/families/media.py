"""Tables of encoders of images and speech: the output of `save_pretrained` in transformers 5.23."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.families.config import Config
from converters.names.families.encoder import CLASSIFIER, LAYERS, POOLED, Encoder, Head, Stack
from converters.names.families.rows import filled

_MASKED = ("masked",)

# -- images ----------------------------------------------------------------------------------------------------


def _patches(config: Config, image: int, patch: int, nested: str = "") -> int:
    return (config.size(f"{nested}image_size", default=image) // config.size(f"{nested}patch_size", default=patch)) ** 2


def _has_square_images(config: Config) -> bool:
    return all(config.get(name) is None or type(config.get(name)) is int for name in ("image_size", "patch_size"))


def _pixels(config: Config, dims: Mapping[str, int], stride: int) -> int:
    """Return the width of a decoder that restores the pixels of a patch."""
    return dims["c"] * config.size("encoder_stride", default=stride) ** 2


_VIT_ATTENTION = """
    attention.attention.[query|key|value].weight h h
    attention.attention.[query|key|value].bias h ? qkv_bias
    attention.output.dense.weight h h
    attention.output.dense.bias h
"""
_VIT_TOP = """
    embeddings.cls_token 1 1 h
    embeddings.patch_embeddings.projection.weight h c p p
    embeddings.patch_embeddings.projection.bias h
    embeddings.position_embeddings 1 n1 h
    layernorm.[weight|bias] h
"""
_VIT = Encoder(
    "ViT",
    "vit",
    _VIT_TOP
    + """
    embeddings.mask_token 1 1 h ? masked
    pooler.dense.weight o h ? pooled
    pooler.dense.bias o ? pooled
    """,
    (
        Stack(
            "encoder.layer",
            LAYERS,
            12,
            _VIT_ATTENTION
            + """
            layernorm_[before|after].[weight|bias] h
            intermediate.dense.weight f h
            intermediate.dense.bias f
            output.dense.weight h f
            output.dense.bias h
            """,
        ),
    ),
    {
        "Model": Head(prefix="", kinds=POOLED),
        "ForImageClassification": Head(CLASSIFIER),
        "ForMaskedImageModeling": Head("decoder.0.weight r h 1 1 \n decoder.0.bias r", kinds=_MASKED),
    },
    {
        "h": ("hidden_size", 768),
        "f": ("intermediate_size", 3072),
        "p": ("patch_size", 16),
        "c": ("num_channels", 3),
    },
    dims=lambda config, dims: {
        "n1": _patches(config, 224, 16) + 1,
        "o": config.size("pooler_output_size", default=dims["h"]),
        "r": _pixels(config, dims, 16),
    },
    flags={"qkv_bias": True},
    covers=_has_square_images,
)
_DINOV2 = Encoder(
    "Dinov2",
    "dinov2",
    _VIT_TOP + "embeddings.mask_token 1 h ? use_mask_token",
    (
        Stack(
            "encoder.layer",
            LAYERS,
            12,
            _VIT_ATTENTION
            + """
            layer_scale[1|2].lambda1 h
            norm[1|2].[weight|bias] h
            mlp.fc1.weight f h
            mlp.fc1.bias f
            mlp.fc2.weight h f
            mlp.fc2.bias h
            """,
        ),
    ),
    {"Model": Head(prefix=""), "ForImageClassification": Head(CLASSIFIER.replace("labels h", "labels 2h"))},
    {"h": ("hidden_size", 768), "p": ("patch_size", 14), "c": ("num_channels", 3)},
    dims=lambda config, dims: {
        "n1": _patches(config, 224, 14) + 1,
        "f": int(dims["h"] * config.number("mlp_ratio", 4)),
    },
    flags={"qkv_bias": True, "use_mask_token": True},
    covers=lambda config: _has_square_images(config) and not config.flag("use_swiglu_ffn"),
)


def _stage_sizes(config: Config, name: str, default: list[int]) -> list[int]:
    values = config.numbers(name) or default
    return [Config({name: value}).count(name) for value in values]


_SWIN_BLOCK = """
    attention.self.[query|key|value].weight h h
    attention.self.[query|key|value].bias h ? qkv_bias
    attention.self.relative_position_bias_table w heads
    attention.output.dense.weight h h
    attention.output.dense.bias h
    layernorm_[before|after].[weight|bias] h
    intermediate.dense.weight f h
    intermediate.dense.bias f
    output.dense.weight h f
    output.dense.bias h
"""


def _swin_depths(config: Config) -> list[int]:
    return _stage_sizes(config, "depths", [2, 2, 6, 2])


def _swin_stages(config: Config) -> Iterator[tuple[str, Shape]]:
    depths, heads = _swin_depths(config), _stage_sizes(config, "num_heads", [3, 6, 12, 24])
    window = config.size("window_size", default=7)
    for number, depth in enumerate(depths):
        hidden = config.size("embed_dim", default=96) << number
        dims = {"h": hidden, "f": int(hidden * config.number("mlp_ratio", 4)), "w": (2 * window - 1) ** 2}
        dims["heads"] = heads[number] if number < len(heads) else 1
        place = f"encoder.layers.{number}."
        for block in range(depth):
            yield from filled(_SWIN_BLOCK, config, dims, prefix=f"{place}blocks.{block}.")
        if number + 1 < len(depths):
            rows = "downsample.norm.[weight|bias] 4h \n downsample.reduction.weight 2h 4h"
            yield from filled(rows, config, dims, prefix=place)


_SWIN = Encoder(
    "Swin",
    "swin",
    """
    embeddings.norm.[weight|bias] e
    embeddings.patch_embeddings.projection.weight e c p p
    embeddings.patch_embeddings.projection.bias e
    embeddings.position_embeddings 1 n e ? use_absolute_embeddings
    embeddings.mask_token 1 1 e ? masked
    layernorm.[weight|bias] h
    """,
    (),
    {
        "Model": Head(prefix=""),
        "ForImageClassification": Head(CLASSIFIER),
        "ForMaskedImageModeling": Head("decoder.0.weight r h 1 1 \n decoder.0.bias r", kinds=_MASKED),
    },
    {"e": ("embed_dim", 96), "p": ("patch_size", 4), "c": ("num_channels", 3)},
    dims=lambda config, dims: {
        "h": dims["e"] << (len(_swin_depths(config)) - 1),
        "n": _patches(config, 224, 4),
        "r": _pixels(config, dims, 32),
    },
    stages=_swin_stages,
    flags={"qkv_bias": True},
    covers=_has_square_images,
    ignored=(r"(.*\.)?relative_position_index",),
)
_CONVNEXT_LAYER = """
    dwconv.weight h 1 7 7
    dwconv.bias h
    layer_scale_parameter h ? scaled
    layernorm.[weight|bias] h
    pwconv1.weight 4h h
    pwconv1.bias 4h
    pwconv2.weight h 4h
    pwconv2.bias h
"""


def _convnext_sizes(config: Config) -> list[int]:
    return _stage_sizes(config, "hidden_sizes", [96, 192, 384, 768])


def _convnext_depths(config: Config) -> list[int]:
    return _stage_sizes(config, "depths", [3, 3, 9, 3])


def _convnext_num_stages(config: Config) -> int:
    return config.size("num_stages", default=4)


def _convnext_stages(config: Config) -> Iterator[tuple[str, Shape]]:
    sizes = _convnext_sizes(config)[: _convnext_num_stages(config)]
    kinds = ("scaled",) if config.number("layer_scale_init_value", 1e-6) > 0 else ()
    for number, (depth, hidden) in enumerate(zip(_convnext_depths(config), sizes, strict=False)):
        place = f"encoder.stages.{number}."
        for layer in range(depth):
            yield from filled(_CONVNEXT_LAYER, config, {"h": hidden}, kinds, f"{place}layers.{layer}.")
    for number, (before, hidden) in enumerate(pairwise(sizes), 1):
        rows = "0.[weight|bias] b \n 1.weight h b 2 2 \n 1.bias h"
        place = f"encoder.stages.{number}.downsampling_layer."
        yield from filled(rows, config, {"b": before, "h": hidden}, prefix=place)


_CONVNEXT = Encoder(
    "ConvNext",
    "convnext",
    """
    embeddings.patch_embeddings.weight e c p p
    embeddings.patch_embeddings.bias e
    embeddings.layernorm.[weight|bias] e
    layernorm.[weight|bias] h
    """,
    (),
    {"Model": Head(prefix=""), "ForImageClassification": Head(CLASSIFIER)},
    {"p": ("patch_size", 4), "c": ("num_channels", 3)},
    dims=lambda config, dims: {"e": _convnext_sizes(config)[0], "h": _convnext_sizes(config)[-1]},
    stages=_convnext_stages,
    covers=lambda config: (
        _convnext_num_stages(config) <= min(map(len, (_convnext_sizes(config), _convnext_depths(config))))
    ),
)

# -- images with texts -----------------------------------------------------------------------------------------

_CLIP_LAYER = """
    layer_norm[1|2].[weight|bias] {h}
    self_attn.[q|k|v|out]_proj.weight {h} {h}
    self_attn.[q|k|v|out]_proj.bias {h}
    mlp.fc1.weight {f} {h}
    mlp.fc1.bias {f}
    mlp.fc2.weight {h} {f}
    mlp.fc2.bias {h}
"""
_TEXT, _VISION = "text_config.", "vision_config."
_BOTH = ("texts",)
_TEXT_TOP = """
    text_model.embeddings.position_embedding.weight q t ? texts
    text_model.embeddings.token_embedding.weight v t ? texts
    text_model.final_layer_norm.[weight|bias] t ? texts
"""
_VISION_TOP = """
    vision_model.embeddings.patch_embedding.weight h c p p
    vision_model.embeddings.position_embedding.weight n h
    vision_model.post_layernorm.[weight|bias] h
"""


def _clip_sizes(
    texts: Mapping[str, int], images: Mapping[str, int]
) -> tuple[tuple[Stack, Stack], dict[str, tuple[str, int | None]]]:
    """Return layers and sizes for both models, with the defaults of their classes."""
    entries = {"t": "hidden_size", "g": "intermediate_size", "v": "vocab_size", "q": "max_position_embeddings"}
    sizes: dict[str, tuple[str, int | None]] = {}
    sizes |= {short: (_TEXT + name, texts[short]) for short, name in entries.items()}
    entries = {"h": "hidden_size", "f": "intermediate_size", "c": "num_channels", "p": "patch_size"}
    sizes |= {short: (_VISION + name, images[short]) for short, name in entries.items()}
    count = f"{_TEXT}num_hidden_layers", f"{_VISION}num_hidden_layers"
    text_rows = _CLIP_LAYER.replace("{h}", "t").replace("{f}", "g")
    vision_rows = _CLIP_LAYER.replace("{h}", "h").replace("{f}", "f")
    text = Stack("text_model.encoder.layers", count[:1], 12, text_rows, needs="texts")
    return (text, Stack("vision_model.encoder.layers", count[1:], 12, vision_rows)), sizes


_CLIP_STACKS, _CLIP_SIZES = _clip_sizes(
    {"t": 512, "g": 2048, "v": 49408, "q": 77}, {"h": 768, "f": 3072, "c": 3, "p": 32}
)
_CLIP = Encoder(
    "CLIP",
    "",
    _TEXT_TOP
    + _VISION_TOP
    + """
    logit_scale ? texts
    text_projection.weight j t ? texts
    visual_projection.weight j h ? texts
    vision_model.embeddings.class_embedding h
    vision_model.pre_layrnorm.[weight|bias] h
    """,
    _CLIP_STACKS,
    {"Model": Head(prefix="", kinds=_BOTH), "ForImageClassification": Head(CLASSIFIER, prefix="")},
    {**_CLIP_SIZES, "j": ("projection_dim", 512)},
    dims=lambda config, dims: {"n": _patches(config, 224, 32, _VISION) + 1},
    ignored=(r"(.*\.)?embeddings\.position_ids",),
)
_SIGLIP_STACKS, _SIGLIP_SIZES = _clip_sizes(
    {"t": 768, "g": 3072, "v": 32000, "q": 64}, {"h": 768, "f": 3072, "c": 3, "p": 16}
)
_SIGLIP = replace(
    _CLIP,
    stem="Siglip",
    top=_TEXT_TOP
    + _VISION_TOP
    + """
    logit_[scale|bias] 1 ? texts
    text_model.head.weight j t ? texts
    text_model.head.bias j ? texts
    vision_model.embeddings.patch_embedding.bias h
    vision_model.head.probe 1 1 h ? vision_config.vision_use_head
    vision_model.head.attention.in_proj_weight 3h h ? vision_config.vision_use_head
    vision_model.head.attention.in_proj_bias 3h ? vision_config.vision_use_head
    vision_model.head.attention.out_proj.weight h h ? vision_config.vision_use_head
    vision_model.head.attention.out_proj.bias h ? vision_config.vision_use_head
    vision_model.head.layernorm.[weight|bias] h ? vision_config.vision_use_head
    vision_model.head.mlp.fc1.weight f h ? vision_config.vision_use_head
    vision_model.head.mlp.fc1.bias f ? vision_config.vision_use_head
    vision_model.head.mlp.fc2.weight h f ? vision_config.vision_use_head
    vision_model.head.mlp.fc2.bias h ? vision_config.vision_use_head
    """,
    stacks=_SIGLIP_STACKS,
    sizes=_SIGLIP_SIZES,
    dims=lambda config, dims: {
        "n": _patches(config, 224, 16, _VISION),
        "j": config.size(f"{_TEXT}projection_size", default=dims["t"]),
    },
    flags={f"{_VISION}vision_use_head": True},
)

# -- speech ----------------------------------------------------------------------------------------------------

_CONVOLUTIONS = {"conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2]}


def _features(config: Config) -> Iterator[tuple[str, Shape]]:
    """Yield the convolutions that turn sound into features."""
    widths, kernels = (_stage_sizes(config, name, default) for name, default in _CONVOLUTIONS.items())
    before, every = 1, config.get("feat_extract_norm") == "layer"
    rows = "conv.weight w b k \n conv.bias w ? conv_bias \n layer_norm.[weight|bias] w ? normed"
    for number, (width, kernel) in enumerate(zip(widths, kernels, strict=False)):
        kinds = ("normed",) if every or not number else ()
        dims = {"w": width, "b": before, "k": kernel}
        yield from filled(rows, config, dims, kinds, f"feature_extractor.conv_layers.{number}.")
        before = width


def _speech_dims(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    groups = config.size("num_conv_pos_embedding_groups", default=16)
    codebooks = config.size("num_codevector_groups", default=2)
    codes = config.size("codevector_dim", default=256)
    return {
        "w": _stage_sizes(config, "conv_dim", _CONVOLUTIONS["conv_dim"])[-1],
        "s": dims["h"] // groups,
        "q": codebooks * config.size("num_codevectors_per_group", default=320),
        "x": codes // codebooks,
        "y": codes,
        "n1": config.count("num_hidden_layers", default=12) + 1,
    }


def _speech_kinds(config: Config) -> Collection[str]:
    masks = config.number("mask_time_prob", 0.05), config.number("mask_feature_prob", 0.0)
    return _MASKED if max(masks) > 0 else ()


_SUMMED = "layer_weights n1 ? use_weighted_layer_sum \n"
_PROJECTED = "projector.weight z h \n projector.bias z \n classifier.weight labels z \n classifier.bias labels \n"
_CODES = """
    quantizer.codevectors 1 q x
    quantizer.weight_proj.weight q w
    quantizer.weight_proj.bias q
    project_hid.weight u h
    project_hid.bias u
    project_q.weight u y
    project_q.bias u
"""
_SPEECH_LAYER = """
    attention.[q|k|v|out]_proj.weight h h
    attention.[q|k|v|out]_proj.bias h
    [layer_norm|final_layer_norm].[weight|bias] h
    feed_forward.intermediate_dense.weight f h
    feed_forward.intermediate_dense.bias f
    feed_forward.output_dense.weight h f
    feed_forward.output_dense.bias h
"""
_SPEECH_FLAGS: Mapping[str, Any] = {"feat_proj_layer_norm": True}
_WAV2VEC2 = Encoder(
    "Wav2Vec2",
    "wav2vec2",
    """
    masked_spec_embed h ? masked
    feature_projection.layer_norm.[weight|bias] w ? feat_proj_layer_norm
    feature_projection.projection.weight h w
    feature_projection.projection.bias h
    encoder.pos_conv_embed.conv.bias h
    encoder.pos_conv_embed.conv.parametrizations.weight.original0 1 1 k
    encoder.pos_conv_embed.conv.parametrizations.weight.original1 h s k
    encoder.layer_norm.[weight|bias] h
    """,
    (Stack("encoder.layers", LAYERS, 12, _SPEECH_LAYER),),
    {
        "Model": Head(prefix=""),
        "ForPreTraining": Head(_CODES),
        "ForCTC": Head("lm_head.weight v h \n lm_head.bias v"),
        "ForSequenceClassification": Head(_SUMMED + _PROJECTED),
        "ForAudioFrameClassification": Head(_SUMMED + CLASSIFIER),
    },
    {
        "h": ("hidden_size", 768),
        "f": ("intermediate_size", 3072),
        "v": ("vocab_size", 32),
        "k": ("num_conv_pos_embeddings", 128),
        "z": ("classifier_proj_size", 256),
        "u": ("proj_codevector_dim", 256),
    },
    dims=_speech_dims,
    kinds=_speech_kinds,
    stages=_features,
    flags=_SPEECH_FLAGS,
    covers=lambda config: config.get("adapter_attn_dim") is None and not config.flag("add_adapter"),
)
_HUBERT = replace(
    _WAV2VEC2,
    stem="Hubert",
    base="hubert",
    heads={name: _WAV2VEC2.heads[name] for name in ("Model", "ForCTC", "ForSequenceClassification")},
    covers=lambda config: not config.flag("conv_pos_batch_norm"),
)

MEDIA: Mapping[str, Encoder] = {
    "vit": _VIT,
    "dinov2": _DINOV2,
    "swin": _SWIN,
    "convnext": _CONVNEXT,
    "clip": _CLIP,
    "siglip": _SIGLIP,
    "wav2vec2": _WAV2VEC2,
    "hubert": _HUBERT,
}
