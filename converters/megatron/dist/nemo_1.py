"""NeMo 1's settings: `model_config.yaml`, with megatron-core's field names.

Format facts: nemo_toolkit 1.23.0 and 2.0.0, nemo/collections/nlp/models/language_modeling/megatron_base_model.py and
megatron_gpt_model.py (`build_transformer_config`, `model_provider_func`, `mcore_model_customize`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: NeMo 1's defaults for missing settings.
_DEFAULTS: Mapping[str, Any] = {
    "activation": "gelu",
    "bias": True,
    "normalization": "layernorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "rotary_percentage": 1.0,
    "rotary_base": 10000,
}
#: Megatron-core's fields by NeMo's name.
_FIELDS = {
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "encoder_seq_length": "seq_length",
    "override_vocab_size": "padded_vocab_size",
    "rotary_percentage": "rotary_percent",
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS = {
    "approx-gelu": "quick_gelu",
    "geglu": "gelu",
    "reglu": "relu",
    "squared-relu": "squared_relu",
    "swiglu": "silu",
}
#: Layer kinds with the same mathematics.
_USUAL = ("", "te_gpt", "megatron_gpt_full_te_layer_autocast", "modelopt")
#: Factor in NeMo's `apply_rope_scaling`.
_ROPE_FACTOR = 8.0
_REFERENCE = re.compile(r"\$\{(?:\.|model\.)(\w+)\}")


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**_DEFAULTS, **{name: _resolved(one, config) for name, one in config.items() if one is not None}}
    if isinstance(custom := stated.pop("mcore_customization_config", {}), Mapping):
        stated |= custom
    activation, norm = str(stated.pop("activation")), str(stated.pop("normalization")).lower()
    name = activation.removeprefix("fast-")
    found = {_FIELDS.get(one, one): value for one, value in stated.items()}
    found |= {
        "activation_func": {"_target_": _ACTIVATIONS.get(name, name)},
        "gated_linear_unit": activation.endswith("glu"),
        "normalization": _NORMS.get(norm, norm),
        "layernorm_zero_centered_gamma": norm == "layernorm1p" or bool(stated.get("layernorm_zero_centered_gamma")),
    }
    if found.pop("scale_positional_embedding", False):
        found["scale_factor"] = _ROPE_FACTOR
    if (layers := found.pop("name", "")) not in _USUAL:
        found["spec"] = layers
    return found


def _resolved(value: Any, config: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
        return config.get(found[1])
    return value
