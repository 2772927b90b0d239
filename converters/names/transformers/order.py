"""Order in which transformers' modules register their parameters, also the order of an optimizer's param groups.

Only this order identifies parameters in DeepSpeed's flat partitions. Written against transformers 5.23 (`modeling_*.py`
of each architecture), which stores a layer's experts in two matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from converters.names.families import composites
from converters.names.families.rows import Family
from converters.names.families.tables import FAMILIES

#: Members of layer modules, for all architectures that don't contradict each other.
_ATTENTION = (
    "ln.",
    "self.query.",
    "self.key.",
    "self.value.",
    "output.",
    "sinks",
    "q_proj.",
    "q_a_proj.",
    "q_a_layernorm.",
    "q_b_proj.",
    "k_proj.",
    "v_proj.",
    "kv_a_proj_with_mqa.",
    "kv_a_layernorm.",
    "kv_b_proj.",
    "o_proj.",
    "q_norm.",
    "k_norm.",
    "query_key_value.",
    "dense.",
    "q_layernorm.",
    "k_layernorm.",
    "c_attn.",
    "c_proj.",
    "dt_bias",
    "A_log",
    "D",
    "conv1d.",
    "in_proj.",
    "in_proj_qkvz.",
    "in_proj_ba.",
    "norm.",
    "out_proj.",
    "in_proj_qkv.",
    "in_proj_z.",
    "in_proj_b.",
    "in_proj_a.",
    "experts.",
    "gate.",
    "shared_experts.",
)
_MLP = ("gate_proj", "gate_up_proj", "up_proj", "down_proj", "c_fc.", "c_proj.", "dense_h_to_4h.", "dense_4h_to_h.")
_TOP = (
    "embed_tokens.",
    "embed_in.",
    "embeddings.word_embeddings.",
    "embeddings.position_embeddings.",
    "embeddings.",
    "wte.",
    "wpe.",
    "layers.",
    "encoder.layer.",
    "encoder.ln.",
    "pooler.",
    "cls.predictions.bias",
    "cls.predictions.transform.dense.",
    "cls.predictions.",
    "h.",
    "norm.",
    "norm_f.",
    "final_layer_norm.",
    "final_layernorm.",
    "ln_f.",
)
_PREFIX = re.compile(r"(model|transformer|gpt_neox|bert)\.")
_LAYER = re.compile(r"(?:layers|h|encoder\.layer)\.(\d+)\.(.*)")
_EXPERTS = re.compile(r"(?:shared_)?experts?\.")


def as_registered(names: Iterable[str], model_type: str) -> list[str]:
    """Sort in-memory names in the architecture's module order, or Llama's if it is unknown."""
    if (composite := composites.COMPOSITES.get(model_type)) is not None:
        return _around_text(list(names), model_type, next(iter(composite.texts.values())))
    return _in_modules(names, FAMILIES.get(model_type, Family))


def _around_text(names: list[str], model_type: str, text: Family) -> list[str]:
    """Sort the surrounding modules first, the output layer last."""
    around = composites.registered(names, model_type)
    inside = {name.replace("model.language_model.", "model.", 1): name for name in names if name not in around}
    return sorted(around, key=around.__getitem__) + [inside[name] for name in _in_modules(inside, text)]


def _in_modules(names: Iterable[str], family: Family | type[Family]) -> list[str]:
    layer, mlp = family.modules, family.expert_modules + _MLP

    def key(name: str) -> tuple[object, ...]:
        inside = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        place: tuple[object, ...] = (_position(inside, _TOP),)
        if match := _LAYER.fullmatch(inside):
            inside = match[2]
            place += (int(match[1]), _position(inside, layer))
            module, _, inside = inside.partition(".")
            place += (_position(inside, mlp if module == "mlp" else _ATTENTION),)
            place += (_position(_EXPERTS.sub("", inside, count=1), _MLP),)
        return (*place, inside.endswith("bias"), name)

    return sorted(names, key=key)


def _position(name: str, prefixes: tuple[str, ...]) -> int:
    return next((index for index, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
