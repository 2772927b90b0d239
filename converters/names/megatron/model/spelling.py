"""Megatron's tensor names, in one chunk and in the whole model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

#: A large model's names, repeated in every rank's file.
_NAMES = 1 << 17

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

#: Prefix for a GPTModel in a model with images.
LANGUAGE = "language_model."
#: Prefix of BertModel's layers, renamed to match other models.
ENCODER, _DECODER = "encoder.", "decoder."
#: Modules beside the GPTModel in a model with images, whole on every tensor-parallel rank.
_BESIDE = re.compile(r"(?:visual|vision_model(?!\.decoder)|vision_tower|multi_modal_projector)\..+|image_newline")

#: Only in a BertModel.
HEADS = ("lm_head.", "pooler.", "binary_head.")

_EXPERT = re.compile(r"(?P<layer>.*)\.mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)")
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.*)")
_MTP = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<inner>transformer_layer|mtp_model_layer)\.(?P<rest>.*)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)")
_EXPERTS = "mlp.experts."
_GROUPED = re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)")

#: Layer inside a multi-token prediction layer, up to 0.16.
MTP_INNER = "transformer_layer"

#: Norms that Transformer Engine includes in the next linear layer.
_OWN_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layer properties that determine norms' names."""

    moe: bool
    latent: bool

    @classmethod
    def of(cls, names: Collection[str]) -> LayerKind:
        return cls(
            any("mlp.router." in name or "mlp.experts." in name for name in names),
            any("self_attention.linear_kv_up_proj." in name for name in names),
        )

    def fuses(self, norm: str) -> bool:
        """Return True if Transformer Engine includes this norm in the next linear layer."""
        if norm == "pre_mlp_layernorm.":
            return not self.moe
        return self.latent != (norm == "input_layernorm.")


def layer_kinds(names: Iterable[str]) -> dict[str, LayerKind]:
    members: dict[str, list[str]] = {}
    for name in names:
        prefix, rest = split_layer(name)
        if prefix:
            members.setdefault(prefix, []).append(rest)
    return {prefix: LayerKind.of(rest) for prefix, rest in members.items()}


@lru_cache(_NAMES)
def is_outside_language_model(name: str) -> bool:
    """Return True for a tensor of a vision module."""
    return _BESIDE.fullmatch(name) is not None


def bare(name: str) -> str:
    """Remove the language model's prefix, and rename an encoder to a decoder."""
    name = name.removeprefix(LANGUAGE)
    return _DECODER + name.removeprefix(ENCODER) if name.startswith(ENCODER) else name


def in_encoder(name: str) -> str:
    return ENCODER + name.removeprefix(_DECODER) if name.startswith(_DECODER) else name


def is_encoders(name: str) -> bool:
    return name.startswith(HEADS)


def in_whole_model(name: str) -> str:
    return name if is_outside_language_model(name) else LANGUAGE + name


@lru_cache(_NAMES)
def split_layer(name: str) -> tuple[str, str]:
    """Split off `decoder.layers.3.` or an MTP layer's inner layer. Return `("", name)` for a name outside layers."""
    match = _LAYER.fullmatch(name) or _MTP.fullmatch(name)
    if match is None:
        return "", name
    return name[: match.start("rest")], match["rest"]


def is_expert(name: str) -> bool:
    """Return True for a routed expert's tensor, sharded along the experts' axes."""
    return expert_of(name) is not None


@lru_cache(_NAMES)
def expert_of(name: str) -> int | None:
    match = _EXPERT.fullmatch(name)
    return int(match["expert"]) if match else None


@dataclass(frozen=True, slots=True)
class Spelling:
    """Spelling of one run's names.

    `local_spec` is for megatron-core's own layers, `grouped` for one module with all experts (`linear_fc1.weight0`).
    `mtp_inner` is the layer inside an MTP layer.
    """

    local_spec: bool = False
    grouped: bool = False
    mtp_inner: str = MTP_INNER

    @classmethod
    def of_names(cls, names: Collection[str]) -> Spelling:
        kinds = layer_kinds(names)
        own = False
        for name in names:
            prefix, rest = split_layer(name)
            own = own or any(rest.startswith(norm) and kinds[prefix].fuses(norm) for norm, _ in _OWN_NORMS if prefix)
        inner = next((m["inner"] for name in names if (m := _MTP.fullmatch(name))), MTP_INNER)
        return cls(own, any(_GROUPED.fullmatch(split_layer(name)[1]) for name in names), inner)

    def canonical(self, name: str, kind: LayerKind | None, first_layer: int, first_expert: int) -> str:
        """Return the whole-model name. The chunk's layers begin with `first_layer`."""
        prefix, rest = split_layer(name)
        if not prefix or kind is None:
            return name
        if match := _LAYER.fullmatch(name):
            prefix = f"decoder.layers.{int(match['layer']) + first_layer}."
        else:
            prefix = prefix.replace(".mtp_model_layer.", f".{MTP_INNER}.")
        if match := _LOCAL_EXPERT.fullmatch(rest):
            rest = f"mlp.experts.local_experts.{int(match['expert']) + first_expert}.{match['rest']}"
        elif match := _GROUPED.fullmatch(rest):
            expert = int(match["expert"]) + first_expert
            rest = f"mlp.experts.local_experts.{expert}.{match['linear']}.{match['kind']}"
        for norm, fused in _OWN_NORMS:
            if rest.startswith(norm) and kind.fuses(norm):
                rest = fused + rest.removeprefix(norm)
        return prefix + rest

    def spelled(self, name: str, kind: LayerKind | None, first_layer: int, first_expert: int) -> str:
        """Invert `canonical`."""
        prefix, rest = split_layer(name)
        if not prefix or kind is None:
            return name
        if match := _LAYER.fullmatch(name):
            prefix = f"decoder.layers.{int(match['layer']) - first_layer}."
        else:
            prefix = prefix.replace(f".{MTP_INNER}.", f".{self.mtp_inner}.")
        if match := _LOCAL_EXPERT.fullmatch(rest):
            expert = int(match["expert"]) - first_expert
            linear, _, what = match["rest"].partition(".")
            rest = (
                f"mlp.experts.{linear}.{what}{expert}"
                if self.grouped
                else f"mlp.experts.local_experts.{expert}.{match['rest']}"
            )
        if self.local_spec:
            for norm, fused in _OWN_NORMS:
                if rest.startswith(fused) and kind.fuses(norm):
                    rest = norm + rest.removeprefix(fused)
        return prefix + rest


# -- order ---------------------------------------------------------------------------------------------------

_MODULES = (
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.tokentype_embeddings.",
    "decoder.layers.",
    "decoder.final_layernorm.",
    "decoder.final_norm.",
    "mtp.layers.",
    "lm_head.dense.",
    "lm_head.",
    "output_layer.",
    "binary_head.",
    "pooler.",
)
_MTP_MODULES = ("enorm.", "hnorm.", "eh_proj.", "transformer_layer.", "mtp_model_layer.", "final_layernorm.")
_LAYER_MODULES = (
    "input_layernorm.",
    *(f"mixer.{name}" for name in ("dt_bias", "A_log", "D", "in_proj.", "conv1d.", "norm.", "out_proj.")),
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.",
    "mlp.",
)
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_NUMBERED = re.compile(r"(\D*)(\d*)")


def _position(name: str, prefixes: tuple[str, ...]) -> int:
    return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


@lru_cache(_NAMES)
def registered(name: str) -> tuple[Any, ...]:
    if is_outside_language_model(name):
        return (-1,)  # first, in the given order: transformers' modules
    place: tuple[Any, ...] = (_position(name, _MODULES),)
    if match := re.fullmatch(r"(?:decoder|mtp)\.layers\.(\d+)\.(.*)", name):
        place += (int(match[1]),)
        rest = match[2]
        if name.startswith("mtp."):
            place += (_position(rest, _MTP_MODULES),)
            rest = re.sub(r"^(transformer_layer|mtp_model_layer)\.", "", rest)
        place += (_position(rest, _LAYER_MODULES),)
        if match := _LOCAL_EXPERT.fullmatch(rest):
            place += (int(match["expert"]),)
            rest = match["rest"]
        elif rest.startswith(_EXPERTS):
            place += (-1,)  # before single experts
        if match := _GROUPED.fullmatch(rest):  # Transformer Engine's GroupedLinear: weight0, bias0, weight1, ...
            return (*place, match["linear"], int(match["expert"]), _position(match["kind"], _PARAMETERS))
        name = rest
    module, _, parameter = name.rpartition(".")
    numbered = _NUMBERED.match(parameter)
    assert numbered is not None
    return (*place, module, _position(numbered[1], _PARAMETERS), int(numbered[2] or 0), parameter)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort a chunk's own names in megatron-core 0.16's registration order."""
    return sorted(names, key=registered)
