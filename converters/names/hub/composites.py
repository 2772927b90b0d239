"""Vision-language models: tables of vision towers and projectors; `families` has the tables of text models.

As transformers 5.23 saves them (`modeling_clip.py`, `modeling_siglip.py`, `modeling_llava.py`, `modeling_gemma3.py`,
`modeling_qwen2_vl.py`, `modeling_qwen2_5_vl.py`, `modeling_qwen3_vl.py`);
`tests/names/test_composites.py` holds each against models that transformers builds and saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.base.errors import CkptError, CorruptError
from ckpt.plan.tensors import Shape
from converters.names.families.config import Config, architectures
from converters.names.families.rows import DERIVED, Family, Saved, filled, spelled_out
from converters.names.families.tables import FAMILIES

_LAYER = """
    layer_norm[1|2].[weight|bias] h
    mlp.fc1.weight f h
    mlp.fc1.bias f
    mlp.fc2.weight h f
    mlp.fc2.bias h
    self_attn.[q|k|v|out]_proj.weight h h
    self_attn.[q|k|v|out]_proj.bias h
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

Sizes = Callable[[Config], Mapping[str, int]]


def _patches(read: Config) -> dict[str, int]:
    """Sizes of CLIP's and SigLIP's towers; `n` is the number of patches."""
    patches = (read.size("image_size") // read.size("patch_size")) ** 2
    sizes = {"f": read.size("intermediate_size"), "c": read.size("num_channels"), "p": read.size("patch_size")}
    return {"h": read.size("hidden_size"), "n": patches, "n1": patches + 1, **sizes}


def _qwen(read: Config) -> dict[str, int]:
    """Sizes of Qwen's towers: `m` is a patch and its neighbours that are merged, `o` what comes of them."""
    hidden, merged = read.size("hidden_size"), read.size("spatial_merge_size", default=2)
    sizes = {"f": read.size("intermediate_size"), "o": read.size("out_hidden_size"), "c": read.size("in_channels")}
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


@dataclass(frozen=True)
class Tower:
    """One `model_type` of a vision tower: the rows beside its layers, and those of each layer."""

    beside: str
    sizes: Sizes
    layer: str = _LAYER
    layers: str = "encoder.layers"
    count: str = "num_hidden_layers"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PATCHES = {"in_channels": 3, "patch_size": 14, "temporal_patch_size": 2}
_TOWERS = {
    "clip_vision_model": Tower(
        """
        embeddings.class_embedding h
        embeddings.patch_embedding.weight h c p p
        embeddings.position_embedding.weight n1 h
        [pre_layrnorm|post_layernorm].[weight|bias] h
        """,
        _patches,
        defaults={"num_channels": 3},
    ),
    "siglip_vision_model": Tower(
        """
        embeddings.patch_embedding.weight h c p p
        embeddings.patch_embedding.bias h
        embeddings.position_embedding.weight n h
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
        _patches,
        defaults={"vision_use_head": True, "num_channels": 3},
    ),
    "qwen2_vl_vision": Tower(
        "patch_embed.proj.weight h c t p p \n merger.ln_q.[weight|bias] h \n" + _QWEN_MERGER,
        _qwen2,
        "norm[1|2].[weight|bias] h \n mlp.fc1.weight f h \n mlp.fc1.bias f \n mlp.fc2.weight h f \n mlp.fc2.bias h"
        + _QWEN_ATTENTION,
        "blocks",
        "depth",
        {**_PATCHES, "mlp_ratio": 4},
    ),
    "qwen2_5_vl_vision": Tower(
        "patch_embed.proj.weight h c t p p \n merger.ln_q.weight h \n" + _QWEN_MERGER,
        _qwen,
        """
        norm[1|2].weight h
        mlp.[gate|up]_proj.weight f h
        mlp.[gate|up]_proj.bias f
        mlp.down_proj.weight h f
        mlp.down_proj.bias h
        """
        + _QWEN_ATTENTION,
        "blocks",
        "depth",
        _PATCHES,
    ),
    "qwen3_vl_vision": Tower(
        """
        patch_embed.proj.weight h c t p p
        patch_embed.proj.bias h
        pos_embed.weight n h
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
        _qwen3,
        """
        norm[1|2].[weight|bias] h
        mlp.linear_fc1.weight f h
        mlp.linear_fc1.bias f
        mlp.linear_fc2.weight h f
        mlp.linear_fc2.bias h
        """
        + _QWEN_ATTENTION,
        "blocks",
        "depth",
        {**_PATCHES, "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
}


@dataclass(frozen=True)
class Composite:
    """One `model_type`: the rows of its projector, where `t` is the text model's hidden size and `w` the tower's.

    `towers` are the model types of the vision tower, `texts` those of the text model and the tables for them.  `tower`
    begins the names of the tower, `model` those of the text model, `head` that of its output layer, `base` all others.
    """

    cls: str
    towers: tuple[str, ...]
    texts: Mapping[str, Family]
    projector: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tower: str = "vision_tower."
    model: str = "language_model.model."
    head: str = "language_model."
    base: str = ""

    def named(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Tensors of the text model under the names that they have here."""
        return {
            self.model + name.removeprefix("model.") if name.startswith("model.") else self.head + name: shape
            for name, shape in shapes.items()
        }


_OF_QWEN: dict[str, Any] = {"tower": "visual.", "model": "model.", "head": "", "base": "model"}
COMPOSITES = {
    "llava": Composite(
        "LlavaForConditionalGeneration",
        ("clip_vision_model", "siglip_vision_model"),
        {name: FAMILIES[name] for name in ("llama", "mistral", "qwen2", "qwen3")},
        """
        linear_1.weight t w
        linear_1.bias t ? multimodal_projector_bias
        linear_2.weight t t
        linear_2.bias t ? multimodal_projector_bias
        """,
        {"multimodal_projector_bias": True},
    ),
    "gemma3": Composite(
        "Gemma3ForConditionalGeneration",
        ("siglip_vision_model",),
        {"gemma3_text": FAMILIES["gemma3_text"]},
        "mm_input_projection_weight w t \n mm_soft_emb_norm.weight w",
        {"tie_word_embeddings": True},
    ),
    "qwen2_vl": Composite(
        "Qwen2VLForConditionalGeneration", ("qwen2_vl_vision",), {"qwen2_vl_text": FAMILIES["qwen2"]}, **_OF_QWEN
    ),
    "qwen2_5_vl": Composite(
        "Qwen2_5_VLForConditionalGeneration", ("qwen2_5_vl_vision",), {"qwen2_5_vl_text": FAMILIES["qwen2"]}, **_OF_QWEN
    ),
    "qwen3_vl": Composite(
        "Qwen3VLForConditionalGeneration",
        ("qwen3_vl_vision",),
        {"qwen3_vl_text": FAMILIES["qwen3"]},
        tower="model.visual.",
        model="model.language_model.",
        head="",
        base="model",
    ),
}


def saved(config: Mapping[str, Any]) -> Saved | None:
    """What the class that the config names writes; None where no table answers, as of a size that is not stated."""
    composite = COMPOSITES.get(str(config.get("model_type")))
    named = architectures(config)
    text, vision = config.get("text_config"), config.get("vision_config")
    if composite is None or (named and named[0] != composite.cls):
        return None
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        return None
    if any(text.get(name) is None for name in ("intermediate_size", "num_key_value_heads")):
        return None  # classes of one family have other ones where these are left out
    family, tower = composite.texts.get(str(text.get("model_type"))), str(vision.get("model_type"))
    if family is None or tower not in composite.towers or isinstance(config.get("vision_feature_layer"), list):
        return None  # with a list, the projector takes several layers side by side
    whole = Config({**composite.defaults, **{name: value for name, value in config.items() if value is not None}})
    try:
        is_tied = whole.flag("tie_word_embeddings")
        model = family.saved({**text, "tie_word_embeddings": is_tied}, family.stem + family.causal)
        if model is None:
            return None
        required = composite.named(model.required) | _tower(_TOWERS[tower], vision, composite.tower)
        if composite.projector:
            sizes = {"t": Config(text).size("hidden_size"), "w": Config(vision).size("hidden_size")}
            required |= dict(filled(composite.projector, whole, sizes, prefix="multi_modal_projector."))
    except CkptError:
        return None  # the class has sizes of its own for what is not stated
    return Saved(composite.cls, required, composite.named(model.optional), DERIVED, composite.base)


def _tower(tower: Tower, config: Mapping[str, Any], prefix: str) -> dict[str, Shape]:
    read = Config({**tower.defaults, **{name: value for name, value in config.items() if value is not None}})
    dims = tower.sizes(read)
    found = dict(spelled_out(dict(filled(tower.beside, read, dims)), prefix, dims.get("e", 0)))
    layer = dict(filled(tower.layer, read, dims))
    for number in range(read.count(tower.count)):
        found.update(spelled_out(layer, f"{prefix}{tower.layers}.{number}.", 0))
    return found
