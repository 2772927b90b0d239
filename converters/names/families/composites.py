"""Vision-language models: tables of vision towers and projectors.

They follow transformers 5.23 (`modeling_*.py` of each model type), also in registration order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckpt.base.errors import CkptError, CorruptError
from ckpt.plan.tensors import Shape
from converters.names.families.config import Config, architectures, nested
from converters.names.families.module_tree import ModuleTree
from converters.names.families.rows import DERIVED, Family, Saved, Sizes, filled, parse, spelled_out
from converters.names.families.tables import FAMILIES

_ATTENTION = """
    self_attn.k_proj.weight h h
    self_attn.k_proj.bias h
    self_attn.v_proj.weight h h
    self_attn.v_proj.bias h
    self_attn.q_proj.weight h h
    self_attn.q_proj.bias h
    self_attn.out_proj.weight h h
    self_attn.out_proj.bias h
"""
_FC = """
    mlp.fc1.weight f h
    mlp.fc1.bias f
    mlp.fc2.weight h f
    mlp.fc2.bias h
"""
_QWEN_ATTENTION = """
    attn.qkv.weight 3h h
    attn.qkv.bias 3h
    attn.proj.weight h h
    attn.proj.bias h
"""
_QWEN_MERGER = """
    merger.mlp.0.weight m m
    merger.mlp.0.bias m
    merger.mlp.2.weight o m
    merger.mlp.2.bias o
"""
_LLAVA = """
    linear_1.weight t w
    linear_1.bias t ? multimodal_projector_bias
    linear_2.weight t t
    linear_2.bias t ? multimodal_projector_bias
"""

_TowerSizes = Callable[[Config], Mapping[str, int]]


def _patches(read: Config) -> dict[str, int]:
    """Return sizes. `n` counts patches."""
    patches = (read.size("image_size") // read.size("patch_size")) ** 2
    return {**_layers(read), "p": read.size("patch_size"), "n": patches, "n1": patches + 1}


def _layers(read: Config) -> dict[str, int]:
    return {"h": read.size("hidden_size"), "f": read.size("intermediate_size"), "c": read.size("num_channels")}


def _internvl(read: Config) -> dict[str, int]:
    (height, width), (p, p2) = _sides(read, "image_size"), _sides(read, "patch_size")
    return {**_layers(read), "p": p, "p2": p2, "n1": (height // p) * (width // p2) + 1}


def _sides(read: Config, name: str) -> tuple[int, int]:
    value = read.get(name)
    sides = value if isinstance(value, list) and len(value) == 2 else [value, value]
    return tuple(Config({name: side}).size(name) for side in sides)  # type: ignore[return-value]


def _pixtral(read: Config) -> dict[str, int]:
    return {**_layers(read), "p": read.size("patch_size")}


def _qwen(read: Config) -> dict[str, int]:
    """Return sizes. `m` is the width after merging neighbouring patches, `o` the output width."""
    hidden, merged = read.size("hidden_size"), read.size("spatial_merge_size", default=2)
    sizes = {"f": read.size("intermediate_size"), "o": read.size("out_hidden_size")}
    sizes |= {"c": read.size("in_chans", "in_channels")}  # releases' name, and transformers 5's
    sizes |= {"p": read.size("patch_size"), "t": read.size("temporal_patch_size")}
    return {"h": hidden, "m": hidden * merged**2, **sizes}


def _qwen2(read: Config) -> dict[str, int]:
    hidden = read.size("embed_dim")
    inner = {"hidden_size": hidden, "intermediate_size": int(hidden * read.number("mlp_ratio"))}
    return _qwen(Config({**read.values, **inner, "out_hidden_size": read.size("hidden_size")}))


def _qwen3(read: Config) -> dict[str, int]:
    tapped = read.get("deepstack_visual_indexes")
    if not isinstance(tapped, list):
        raise CorruptError("the config does not list layers", expected="deepstack_visual_indexes", found=tapped)
    return {**_qwen(read), "n": read.size("num_position_embeddings"), "e": len(tapped)}


def _glm(read: Config) -> dict[str, int]:
    """Return sizes. `s` patches are merged per side."""
    patches = (read.size("image_size") // read.size("patch_size")) ** 2
    return {**_qwen(read), "n": patches, "s": read.size("spatial_merge_size")}


@dataclass(frozen=True)
class Tower:
    """Vision tower: the rows before its layers, in each layer, and after them."""

    before: str
    sizes: _TowerSizes
    layer: str
    behind: str = ""
    layers: str = "encoder.layers"
    count: str = "num_hidden_layers"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Prefix of every name in files. transformers 5.6 and later have none in memory.
    inside: str = ""

    def shapes(self, config: Mapping[str, Any], prefix: str) -> dict[str, Shape]:
        """Return tensors in transformers' registration order."""
        stated = {name: value for name, value in config.items() if value is not None}
        read, prefix = Config({**self.defaults, **stated, str(config.get("norm_type")): True}), prefix + self.inside
        dims = self.sizes(read)
        found = dict(spelled_out(dict(filled(self.before, read, dims)), prefix, 0))
        layer = dict(filled(self.layer, read, dims))
        for number in range(read.count(self.count)):
            found.update(spelled_out(layer, f"{prefix}{self.layers}.{number}.", 0))
        behind = dict(filled(self.behind, read, dims))
        found |= {prefix + name: shape for name, shape in behind.items() if "{e}" not in name}
        for number in range(dims.get("e", 0)):  # all tensors of a list entry, then the next entry's
            found |= {prefix + n.replace("{e}", str(number)): shape for n, shape in behind.items() if "{e}" in n}
        return found

    def rows(self) -> Iterator[str]:
        for prefix, text in (("", self.before), (f"{self.layers}.#.", self.layer), ("", self.behind)):
            yield from (self.inside + prefix + row.name.replace("{e}", "#") for row in parse(text))

    def has(self, name: str) -> bool:
        """Return True for the name of one of its tensors, without `inside`."""
        return self._modules.has(self.inside + name)

    @cached_property
    def _modules(self) -> ModuleTree:
        return ModuleTree.of(self.rows())


_PATCHES = {"in_channels": 3, "patch_size": 14, "temporal_patch_size": 2}
_QWEN3 = Tower(
    """
    patch_embed.proj.weight h c t p p
    patch_embed.proj.bias h
    pos_embed.weight n h
    """,
    _qwen3,
    """
    norm[1|2].[weight|bias] h
    attn.qkv.weight 3h h
    attn.qkv.bias 3h
    attn.proj.weight h h
    attn.proj.bias h
    mlp.linear_fc1.weight f h
    mlp.linear_fc1.bias f
    mlp.linear_fc2.weight h f
    mlp.linear_fc2.bias h
    """,
    """
    merger.norm.[weight|bias] h
    merger.linear_fc1.weight m m
    merger.linear_fc1.bias m
    merger.linear_fc2.weight o m
    merger.linear_fc2.bias o
    deepstack_merger_list.{e}.norm.[weight|bias] m
    deepstack_merger_list.{e}.linear_fc1.weight m m
    deepstack_merger_list.{e}.linear_fc1.bias m
    deepstack_merger_list.{e}.linear_fc2.weight o m
    deepstack_merger_list.{e}.linear_fc2.bias o
    """,
    "blocks",
    "depth",
    {**_PATCHES, "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
)
_QWEN3_5 = replace(_QWEN3, defaults={**_QWEN3.defaults, "deepstack_visual_indexes": []})
TOWERS = {
    "clip_vision_model": Tower(
        """
        embeddings.class_embedding h
        embeddings.patch_embedding.weight h c p p
        embeddings.position_embedding.weight n1 h
        pre_layrnorm.[weight|bias] h
        """,
        _patches,
        _ATTENTION + "layer_norm1.[weight|bias] h" + _FC + "layer_norm2.[weight|bias] h",
        "post_layernorm.[weight|bias] h",
        defaults={"num_channels": 3},
        inside="vision_model.",
    ),
    "siglip_vision_model": Tower(
        """
        embeddings.patch_embedding.weight h c p p
        embeddings.patch_embedding.bias h
        embeddings.position_embedding.weight n h
        """,
        _patches,
        "layer_norm1.[weight|bias] h" + _ATTENTION + "layer_norm2.[weight|bias] h" + _FC,
        """
        post_layernorm.[weight|bias] h
        head.probe 1 1 h ? vision_use_head
        head.attention.in_proj_weight 3h h ? vision_use_head
        head.attention.in_proj_bias 3h ? vision_use_head
        head.attention.out_proj.weight h h ? vision_use_head
        head.attention.out_proj.bias h ? vision_use_head
        head.layernorm.[weight|bias] h ? vision_use_head
        head.mlp.fc1.weight f h ? vision_use_head
        head.mlp.fc1.bias f ? vision_use_head
        head.mlp.fc2.weight h f ? vision_use_head
        head.mlp.fc2.bias h ? vision_use_head
        """,
        defaults={"vision_use_head": True, "num_channels": 3},
        inside="vision_model.",
    ),
    "internvl_vision": Tower(
        """
        embeddings.cls_token 1 1 h
        embeddings.mask_token 1 1 h ? use_mask_token
        embeddings.position_embeddings 1 n1 h ? use_absolute_position_embeddings
        embeddings.patch_embeddings.projection.weight h c p p2
        embeddings.patch_embeddings.projection.bias h
        """,
        _internvl,
        """
        lambda_[1|2] h
        attention.q_proj.weight h h
        attention.q_proj.bias h ? attention_bias
        attention.k_proj.weight h h
        attention.k_proj.bias h ? attention_bias
        attention.v_proj.weight h h
        attention.v_proj.bias h ? attention_bias
        attention.projection_layer.weight h h
        attention.projection_layer.bias h
        attention.[q|k]_norm.weight h ? use_qk_norm
        mlp.fc1.weight f h
        mlp.fc1.bias f
        mlp.fc2.weight h f
        mlp.fc2.bias h
        layernorm_before.weight h
        layernorm_before.bias h ? !rms_norm
        layernorm_after.weight h
        layernorm_after.bias h ? !rms_norm
        """,
        "layernorm.[weight|bias] h ? !use_mean_pooling",
        "encoder.layer",
        defaults={
            "num_channels": 3,
            "image_size": 448,
            "patch_size": 14,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": True,
        },
    ),
    "pixtral": Tower(
        "patch_conv.weight h c p p \n ln_pre.weight h",
        _pixtral,
        """
        attention_norm.weight h
        feed_forward.[gate|up]_proj.weight f h
        feed_forward.down_proj.weight h f
        attention.[k|v|q|o]_proj.weight h h
        ffn_norm.weight h
        """,
        layers="transformer.layers",
        defaults={"num_channels": 3},
    ),
    "qwen2_vl_vision": Tower(
        "patch_embed.proj.weight h c t p p",
        _qwen2,
        "norm[1|2].[weight|bias] h" + _QWEN_ATTENTION + _FC,
        "merger.ln_q.[weight|bias] h" + _QWEN_MERGER,
        "blocks",
        "depth",
        {**_PATCHES, "mlp_ratio": 4},
    ),
    "qwen2_5_vl_vision": Tower(
        "patch_embed.proj.weight h c t p p",
        _qwen,
        "norm[1|2].weight h"
        + _QWEN_ATTENTION
        + """
        mlp.gate_proj.weight f h
        mlp.gate_proj.bias f
        mlp.up_proj.weight f h
        mlp.up_proj.bias f
        mlp.down_proj.weight h f
        mlp.down_proj.bias h
        """,
        "merger.ln_q.weight h" + _QWEN_MERGER,
        "blocks",
        "depth",
        _PATCHES,
    ),
    "qwen3_vl_vision": _QWEN3,
    "qwen3_vl_moe_vision": _QWEN3,
    "qwen3_5_vision": _QWEN3_5,
    "qwen3_5_moe_vision": _QWEN3_5,
    "glm4v_moe_vision": Tower(
        """
        embeddings.position_embedding.weight n h
        patch_embed.proj.weight h c t p p
        patch_embed.proj.bias h
        """,
        _glm,
        """
        norm[1|2].weight h
        attn.qkv.weight 3h h
        attn.qkv.bias 3h ? attention_bias
        attn.proj.weight h h
        mlp.[gate|up]_proj.weight o h
        mlp.down_proj.weight h o
        """,
        """
        merger.proj.weight o o
        merger.post_projection_norm.[weight|bias] o
        merger.[gate|up]_proj.weight f o
        merger.down_proj.weight o f
        post_conv_layernorm.weight h
        downsample.weight o h s s
        downsample.bias o
        post_layernorm.weight h
        """,
        "blocks",
        "depth",
        {**_PATCHES, "image_size": 336, "spatial_merge_size": 2},
    ),
}

#: For missing sizes, for example in LLaVA's releases.
_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    name: {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **more}
    for name, more in {
        "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "vocab_size": 32000},
        "mistral": {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
    }.items()
}
#: With or without transformers 4's and in-memory path parts.
_MODULE = re.compile(r"(?:model\.)?(visual|vision_tower|multi_modal_projector)\.(?:vision_model\.)?(.*)")
_TEXT = re.compile(r"(?:model\.language_model|language_model\.model|language_model|model)\.(.*)")


@dataclass(frozen=True)
class Composite:
    """Vision-language `model_type`. In projector rows, `t` is the text model's hidden size and `w` the tower's.

    `q` is `w` times the number of patches merged into one. `beside` has the rows outside all modules. `tower`, `model`,
    `head` and `base` are name prefixes: of the tower, the text model, its output layer, and all others.
    """

    cls: str
    towers: tuple[str, ...]
    texts: Mapping[str, Family]
    projector: str = ""
    beside: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tower: str = "vision_tower."
    model: str = "language_model.model."
    head: str = "language_model."
    base: str = ""
    ignored: tuple[str, ...] = ()
    #: The text model's config may tie the output layer, too.
    text_ties: bool = False

    @property
    def prefixes(self) -> Iterator[tuple[str, str]]:
        """Prefixes of the output layer and of each module, in memory and on the Hub."""
        yield "lm_head", f"{self.head}lm_head"
        yield "model.language_model", self.model.removesuffix(".")
        tower = self.tower.removesuffix(".")
        yield "model." + tower.removeprefix("model."), tower
        others = (["multi_modal_projector"] if self.projector else []) + [row.name for row in parse(self.beside)]
        yield from ((f"model.{other}", other) for other in others)

    def name(self, name: str) -> str:
        return self.model + name.removeprefix("model.") if name.startswith("model.") else self.head + name

    def named(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {self.name(name): shape for name, shape in shapes.items()}

    def prefix(self, layer: int | str) -> str:
        return f"{self.model}layers.{layer}."

    def predicted_prefix(self, number: int, num_layers: int) -> str:
        text = next(iter(self.texts.values()))
        return text.predicted_prefix(number, num_layers) if text.predicted else self.prefix(num_layers + number)

    @property
    def inside(self) -> str:
        return next(iter(self.texts.values())).inside

    def current(self, name: str) -> str:
        """Return the Hub's name for another release's or an in-memory name."""
        if (match := _MODULE.fullmatch(name)) is not None and match[1] == "multi_modal_projector":
            return f"multi_modal_projector.{match[2]}"
        if match is not None:
            insides = (TOWERS[kind].inside for kind in self.towers if TOWERS[kind].has(match[2]))
            return self.tower + next(insides, "") + match[2]
        if name.endswith("lm_head.weight"):
            return self.head + "lm_head.weight"
        if name == "model.image_newline":
            return "image_newline"
        match = _TEXT.fullmatch(name)
        return name if match is None else self.model + match[1]

    def rows_around_text(self, tower: str) -> Iterator[str]:
        """Yield the Hub's names, with `#` for numbers, of all modules before the text model."""
        yield from (row.name for row in parse(self.beside))
        yield from (self.tower + name for name in TOWERS[tower].rows())
        yield from (f"multi_modal_projector.{row.name}" for row in parse(self.projector))

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """Return the text model's sizes. Tensors of tower and projector are outside its layers."""
        family, text = self.text(config)
        sizes = family.sizes(text)
        return replace(sizes, top=self.non_text_shapes(config, sizes.config) | self.named(sizes.top))

    def ties(self, config: Mapping[str, Any]) -> bool | None:
        """Return True if the config ties the output layer to the embedding. None leaves it to the class."""
        parts = (config, nested(config, "text_config")) if self.text_ties else (config,)
        stated = [bool(part["tie_word_embeddings"]) for part in parts if part.get("tie_word_embeddings") is not None]
        return any(stated) if stated else None

    def text(self, config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
        """Return the text model's table and config. Some releases have its config at the top."""
        inner = nested(config, "text_config") or {name: value for name, value in config.items() if name != "model_type"}
        kind = str(inner.get("model_type", next(iter(self.texts))))
        if kind not in self.texts:
            raise CorruptError(
                "the text model has no table", expected="one of " + ", ".join(self.texts), found=f"model_type {kind!r}"
            )
        ties = self.ties(config)
        tied = self.defaults.get("tie_word_embeddings", False) if ties is None else ties
        stated = {name: value for name, value in inner.items() if value is not None or name == "sliding_window"}
        defaults = _TEXT_DEFAULTS.get(kind, {})
        return self.texts[kind], {**defaults, **stated, "model_type": kind, "tie_word_embeddings": tied}

    def non_text_shapes(self, config: Mapping[str, Any], text: Config) -> dict[str, Shape]:
        vision = nested(config, "vision_config")
        kind = vision.get("model_type") if len(self.towers) > 1 else self.towers[0]
        if kind not in self.towers or isinstance(config.get("vision_feature_layer"), list):
            raise CorruptError(  # with a list, the projector takes several layers side by side
                "the vision tower has no table", expected="one of " + ", ".join(self.towers), found=f"model_type {kind}"
            )
        found: dict[str, Shape] = {}
        whole = Config({**self.defaults, **{name: value for name, value in config.items() if value is not None}})
        sizes = {"t": text.size("hidden_size")}
        if self.projector:
            ratio = whole.number("downsample_ratio", 1.0)
            if not 0 < ratio <= 1:
                raise CorruptError("the config states no size", expected="downsample_ratio: above 0", found=ratio)
            merged = whole.size("spatial_merge_size", default=int(1 / ratio))
            width = Config(vision).size("hidden_size")
            sizes |= {"w": width, "q": width * merged**2}
        found |= dict(filled(self.beside, whole, sizes))
        found |= TOWERS[str(kind)].shapes(vision, self.tower)
        return found | dict(filled(self.projector, whole, sizes, prefix="multi_modal_projector."))


_OF_QWEN: dict[str, Any] = {"tower": "visual.", "model": "model.", "head": "", "base": "model", "text_ties": True}
_NESTED: dict[str, Any] = {"tower": "model.visual.", "model": "model.language_model.", "head": "", "base": "model"}
_COMMON_TEXTS = {name: FAMILIES[name] for name in ("llama", "mistral", "qwen2", "qwen3")}
_STACKED_EXPERTS = """
    mlp.experts.gate_up_proj e 2m h ? sparse
    mlp.experts.down_proj e h m ? sparse
    mlp.gate.weight e h ? sparse
"""
_QWEN2 = replace(FAMILIES["qwen2"], defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5}, unread=("head_dim",))
_QWEN3_TEXT = replace(FAMILIES["qwen3"], defaults={"head_dim": 128, "rope_theta": 500000.0})
_QWEN3_MOE = replace(
    FAMILIES["qwen3_moe"],
    layer=FAMILIES["qwen3"].layer + _STACKED_EXPERTS,
    defaults={"rope_theta": 500000.0, "norm_topk_prob": True},
    unread=("norm_topk_prob",),  # its router always normalizes
)
_GLM = replace(FAMILIES["glm4_moe"], unread=("use_qk_norm",), defaults={"attention_bias": True}, prediction="")
COMPOSITES = {
    "llava": Composite(
        "LlavaForConditionalGeneration",
        ("clip_vision_model", "siglip_vision_model", "pixtral"),
        _COMMON_TEXTS,
        _LLAVA,
        defaults={"multimodal_projector_bias": True},
        text_ties=True,
    ),
    **{
        name: Composite(
            cls,
            towers,
            _COMMON_TEXTS,
            _LLAVA,
            "image_newline t",
            {"multimodal_projector_bias": True},
            text_ties=name == "llava_onevision",
        )
        for name, cls, towers in (
            ("llava_next", "LlavaNextForConditionalGeneration", ("clip_vision_model", "siglip_vision_model")),
            ("llava_onevision", "LlavaOnevisionForConditionalGeneration", ("siglip_vision_model",)),
        )
    },
    "internvl": Composite(
        "InternVLForConditionalGeneration",
        ("internvl_vision",),
        {name: FAMILIES[name] for name in ("qwen2", "qwen3", "llama", "qwen3_moe")},
        """
        layer_norm.[weight|bias] q
        linear_1.weight t q
        linear_1.bias t
        linear_2.weight t t
        linear_2.bias t
        """,
        defaults={"tie_word_embeddings": True, "downsample_ratio": 0.5},
    ),
    "mistral3": Composite(
        "Mistral3ForConditionalGeneration",
        ("pixtral",),
        {name: FAMILIES[name] for name in ("mistral", "ministral3")},
        "norm.weight w \n patch_merger.merging_layer.weight w q" + _LLAVA,
        defaults={"tie_word_embeddings": True, "spatial_merge_size": 2},
    ),
    "gemma3": Composite(
        "Gemma3ForConditionalGeneration",
        ("siglip_vision_model",),
        {"gemma3_text": FAMILIES["gemma3_text"]},
        "mm_input_projection_weight w t \n mm_soft_emb_norm.weight w",
        defaults={"tie_word_embeddings": True},
    ),
    "qwen2_vl": Composite(
        "Qwen2VLForConditionalGeneration", ("qwen2_vl_vision",), {"qwen2_vl_text": _QWEN2}, **_OF_QWEN
    ),
    "qwen2_5_vl": Composite(
        "Qwen2_5_VLForConditionalGeneration", ("qwen2_5_vl_vision",), {"qwen2_5_vl_text": _QWEN2}, **_OF_QWEN
    ),
    "qwen3_vl": Composite(
        "Qwen3VLForConditionalGeneration", ("qwen3_vl_vision",), {"qwen3_vl_text": _QWEN3_TEXT}, **_NESTED
    ),
    "qwen3_vl_moe": Composite(
        "Qwen3VLMoeForConditionalGeneration",
        ("qwen3_vl_moe_vision",),
        {"qwen3_vl_moe_text": _QWEN3_MOE},
        **_NESTED,
    ),
    "qwen3_5": Composite(
        "Qwen3_5ForConditionalGeneration", ("qwen3_5_vision",), {"qwen3_5_text": FAMILIES["qwen3_5_text"]}, **_NESTED
    ),
    "qwen3_5_moe": Composite(
        "Qwen3_5MoeForConditionalGeneration",
        ("qwen3_5_moe_vision",),
        {"qwen3_5_moe_text": FAMILIES["qwen3_5_moe_text"]},
        **_NESTED,
    ),
    "glm4v_moe": Composite(
        "Glm4vMoeForConditionalGeneration",
        ("glm4v_moe_vision",),
        {"glm4v_moe_text": _GLM},
        text_ties=True,
        **_NESTED,
    ),
}


def saved(config: Mapping[str, Any]) -> Saved | None:
    """Return the saved tensors. None without a table, or if the config lacks a size."""
    composite = COMPOSITES.get(str(config.get("model_type")))
    named = architectures(config)
    text, vision = config.get("text_config"), config.get("vision_config")
    if composite is None or (named and named[0] != composite.cls):
        return None
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        return None
    if any(text.get(name) is None for name in ("intermediate_size", "num_key_value_heads")):
        return None  # the family's classes have different defaults
    if str(text.get("model_type")) not in composite.texts or vision.get("model_type") not in composite.towers:
        return None
    try:
        family, inner = composite.text(config)
        model = family.saved(inner, family.stem + family.causal)
        if model is None:
            return None
        required = composite.non_text_shapes(config, Config(inner)) | composite.named(model.required)
    except CkptError:
        return None  # the class has its own defaults
    return Saved(composite.cls, required, composite.named(model.optional), DERIVED, composite.base)
