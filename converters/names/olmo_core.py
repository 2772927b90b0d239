"""Relation between OLMo-core's names and the Hub's: one name for one name.

Follows ai2-olmo-core 3.0.0, nn/hf/convert.py (`OLMO_CORE_TO_HF_WEIGHT_MAPPINGS`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from ckpt.base.errors import UsageError
from ckpt.plan.checkpoint import HUB, Checkpoint, Layout
from ckpt.plan.namespace import OLMO_CORE, Namespace
from ckpt.plan.relation import Link, Relation, translate
from converters.names.families import tables as families
from converters.names.megatron.relation import check_complete
from converters.names.olmo_core_run import check_run
from converters.names.run_names import OLMOS

#: The Hub's modules without the layer, with OLMo-core's.
_NAMES = {
    "model.embed_tokens": "embeddings",
    "model.norm": "lm_head.norm",
    "lm_head": "lm_head.w_out",
    **{f"self_attn.{x}_proj": f"attention.w_{x}" for x in "qkv"},
    "self_attn.o_proj": "attention.w_out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "attention_norm",
    "post_feedforward_layernorm": "feed_forward_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD, _EMBEDDINGS = "lm_head.w_out.weight", "embeddings.weight"


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """Rename OLMo-core's names to the Hub's.

    Raise CorruptError if the run's settings describe another model than the config, LossError for a tensor without a
    place.
    """
    notes = check_run(checkpoint)
    relation = _relation(checkpoint, checkpoint.shapes).inverse()
    check_complete(relation, checkpoint.shapes)
    return replace(translate(checkpoint, relation, HUB), ties={}, notes=(*checkpoint.notes, *notes))


def from_hub(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    relation = _relation(checkpoint, ())
    check_complete(relation, checkpoint.shapes)
    return translate(checkpoint, relation, OLMO_CORE)


def _relation(checkpoint: Checkpoint, present: Collection[str]) -> Relation:
    saved = families.saved_of(checkpoint, "OLMo-core's names", OLMOS)
    names = {name: _spelled(name) for name in saved.required}
    links = tuple(Link.rename(name, names[name], shape) for name, shape in saved.required.items())
    own = {names[name]: shape for name, shape in saved.required.items()}
    copies = {}
    if "lm_head.weight" in saved.optional and _HEAD in present:  # the Hub's files have only one
        copies = {_HEAD: _EMBEDDINGS}
        own[_HEAD] = own[_EMBEDDINGS]
    return Relation(links, dict(saved.required), own, b_copies=copies)


def _spelled(name: str) -> str:
    layer = _LAYER.match(name)
    module, _, kind = _LAYER.sub("", name).rpartition(".")
    if module not in _NAMES:
        raise UsageError("OLMo-core's model for this architecture doesn't have this tensor", fqn=name)
    return f"{f'blocks.{layer[1]}.' if layer else ''}{_NAMES[module]}.{kind}"


NAMESPACE = Namespace(to_hub, from_hub)
