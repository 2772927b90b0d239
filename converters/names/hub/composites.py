"""Models that see: tables of vision towers, and of what joins them to text models, whose tables `families` has.

As transformers 5.23 saves them (`modeling_clip.py`, `modeling_siglip.py`, `modeling_llava.py`, `modeling_gemma3.py`);
`tests/names/test_composites.py` holds each against models that transformers builds and saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CkptError
from ckpt.plan.tensors import Shape
from converters.names.hub import families
from converters.names.hub.rows import DERIVED, Filling, Saved, parse
from converters.names.megatron.sizes import Config
from converters.names.transformers.installed import architectures

_LAYER = """
    layer_norm[1|2].[weight|bias] h
    mlp.fc1.weight f h
    mlp.fc1.bias f
    mlp.fc2.weight h f
    mlp.fc2.bias h
    self_attn.[q|k|v|out]_proj.weight h h
    self_attn.[q|k|v|out]_proj.bias h
"""
#: Of each `model_type` of a vision tower what stands beside its layers; `n` is the number of patches.
_TOWERS = {
    "clip_vision_model": """
        embeddings.class_embedding h
        embeddings.patch_embedding.weight h c p p
        embeddings.position_embedding.weight n1 h
        [pre_layrnorm|post_layernorm].[weight|bias] h
    """,
    "siglip_vision_model": """
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
}


@dataclass(frozen=True)
class Composite:
    """One `model_type`: the rows of its projector, where `t` is the text model's hidden size and `w` the tower's.

    `towers` and `texts` are the model types that it may have inside.
    """

    cls: str
    projector: str
    towers: tuple[str, ...]
    texts: tuple[str, ...]
    defaults: Mapping[str, Any]


COMPOSITES = {
    "llava": Composite(
        "LlavaForConditionalGeneration",
        """
        linear_1.weight t w
        linear_1.bias t ? multimodal_projector_bias
        linear_2.weight t t
        linear_2.bias t ? multimodal_projector_bias
        """,
        ("clip_vision_model", "siglip_vision_model"),
        ("llama", "mistral", "qwen2", "qwen3"),
        {"multimodal_projector_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3": Composite(
        "Gemma3ForConditionalGeneration",
        "mm_input_projection_weight w t \n mm_soft_emb_norm.weight w",
        ("siglip_vision_model",),
        ("gemma3_text",),
        {"tie_word_embeddings": True},
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
    if text.get("model_type") not in composite.texts or vision.get("model_type") not in composite.towers:
        return None
    whole = Config({**composite.defaults, **{name: value for name, value in config.items() if value is not None}})
    if isinstance(config.get("vision_feature_layer"), list):
        return None  # the projector takes several layers side by side
    try:
        model = families.saved(
            {**text, "architectures": None, "tie_word_embeddings": whole.flag("tie_word_embeddings")}
        )
        if model is None:
            return None
        required = {f"language_model.{name}": shape for name, shape in model.required.items()}
        required |= _tower(vision)
        sizes = {"t": Config(text).size("hidden_size"), "w": Config(vision).size("hidden_size")}
        joined = Filling(whole, sizes, 0)
        required |= dict(joined.tensors(parse(composite.projector), (), "multi_modal_projector."))
    except CkptError:
        return None  # the class has sizes of its own for what is not stated
    optional = {f"language_model.{name}": shape for name, shape in model.optional.items()}
    return Saved(composite.cls, required, optional, DERIVED)


def _tower(config: Mapping[str, Any]) -> dict[str, Shape]:
    read = Config({"vision_use_head": True, "num_channels": 3, **config})
    patches = (read.size("image_size") // read.size("patch_size")) ** 2
    dims = {"h": read.size("hidden_size"), "f": read.size("intermediate_size"), "c": read.size("num_channels")}
    dims |= {"p": read.size("patch_size"), "n": patches, "n1": patches + 1}
    filling = Filling(read, dims, read.size("num_hidden_layers"))
    found = dict(filling.tensors(parse(_TOWERS[str(config["model_type"])]), (), "vision_tower."))
    for number in range(filling.num_layers):
        found |= dict(filling.tensors(parse(_LAYER), (), f"vision_tower.encoder.layers.{number}."))
    return found
