"""Relation between torchtitan's names and the Hub's.

Follows torchtitan 0.2.2 and 0.3.0 (`models/*/state_dict_adapter.py`). Some names differ between them: both are read,
and the newer are written. torchtitan's Llama rotates pairs of neighbours, and transformers rotates halves of a head, so
their query and key rows are ordered differently. A layer's experts are one tensor, [experts, out, in].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from ckpt.base.errors import UsageError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import HUB, Checkpoint, Layout
from ckpt.plan.namespace import TORCHTITAN, Namespace
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, stepped, whole
from converters.names.families import tables as families
from converters.names.families.config import Config
from converters.names.families.rows import Saved
from converters.names.megatron.relation import check_complete
from converters.names.run_names import PERMUTED
from converters.names.torchtitan_run import check_run

#: The Hub's names without the layer, with torchtitan's names, newest first. `*` is an expert.
_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight output.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{x}_proj.weight": f"attention.qkv_linear.w{x}.weight attention.w{x}.weight" for x in "qkv"},
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E moe.expert_bias",
}
for _part, _w, _dims in (("gate", "w1", "EFD"), ("down", "w2", "EDF"), ("up", "w3", "EFD")):
    _NAMES |= {
        f"mlp.{_part}_proj.weight": f"feed_forward.{_w}.weight",
        f"mlp.shared_experts.{_part}_proj.weight": f"moe.shared_experts.{_w}.weight",
        f"mlp.experts.*.{_part}_proj.weight": f"moe.routed_experts.inner_experts.{_w}_{_dims} moe.experts.{_w}",
    }
#: Bias that balances experts, without a place in most Hub architectures.
_BALANCE = re.compile(r"layers\.\d+\.moe\.expert_bias(_E)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """Rename torchtitan's names to the Hub's.

    Raise UsageError for an unknown architecture, LossError for a tensor without a place.
    """
    found, saved = checkpoint.shapes, families.saved_of(checkpoint, "torchtitan's names", PERMUTED)
    check_run(checkpoint)
    has_bias = any(name.endswith("e_score_correction_bias") for name in saved.required)
    left = set() if has_bias else {name for name in found if _BALANCE.fullmatch(name)}
    shapes = {name: shape for name, shape in found.items() if name not in left}
    relation = _relation(checkpoint, saved, shapes).inverse()
    check_complete(relation, shapes)
    kept = replace(checkpoint, tensors={key: t for key, t in checkpoint.tensors.items() if key[0] not in left})
    notes = (
        [f"left out {pluralize(len(left), 'torchtitan tensor')} (moe.expert_bias), like torchtitan itself"]
        if left
        else []
    )
    return replace(translate(kept, relation, HUB), ties={}, notes=(*checkpoint.notes, *notes))


def from_hub(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Raise the same errors as `to_hub`."""
    saved = families.saved_of(checkpoint, "torchtitan's names", PERMUTED)
    relation = _relation(checkpoint, saved, ())
    check_complete(relation, checkpoint.shapes)
    ties = dict.fromkeys(saved.optional.keys() & {"lm_head.weight"}, "tok_embeddings.weight")
    return replace(translate(checkpoint, relation, TORCHTITAN), ties=ties)


def _relation(checkpoint: Checkpoint, saved: Saved, present: Collection[str]) -> Relation:
    """Use the names in `present`, or else the newest."""
    config = Config(checkpoint.config or {})
    permuted = PERMUTED[str(config.get("model_type"))]
    heads = config.size("num_attention_heads")
    groups = config.size("num_key_value_heads", default=heads)
    links: list[Link] = []
    titan: dict[str, Shape] = {}
    for name, shape in saved.required.items():
        new, expert = _spelled(name, present)
        if expert is not None:
            box = Box((expert, *(0,) * len(shape)), (1, *shape))
            links.append(Link(name, whole(shape), new, box, tuple(range(1, len(shape) + 1))))
            titan[new] = (expert + 1, *shape)  # experts come in order
            continue
        titan[new] = shape
        if permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            links += _rotated_rows(name, new, shape, heads if name.endswith("q_proj.weight") else groups)
        else:
            links.append(Link.rename(name, new, shape))
    copies = {}
    if "lm_head.weight" in saved.optional:  # the Hub's files have only one
        both = [name for name in _NAMES["lm_head.weight"].split() if name in present]
        copies = dict.fromkeys(both, "tok_embeddings.weight")
        titan |= dict.fromkeys(both, titan["tok_embeddings.weight"])
    return Relation(tuple(links), dict(saved.required), titan, b_copies=copies)


def _spelled(name: str, present: Collection[str]) -> tuple[str, int | None]:
    layer, expert = _LAYER.match(name), _EXPERT.search(name)
    names = _NAMES.get(_EXPERT.sub("*", _LAYER.sub("", name)))
    if names is None:
        raise UsageError("torchtitan's model for this architecture doesn't have this tensor", fqn=name)
    spelled = [f"layers.{layer[1]}.{one}" if layer else one for one in names.split()]
    return next((one for one in spelled if one in present), spelled[0]), int(expert[0]) if expert else None


def _rotated_rows(hub: str, titan: str, shape: Shape, heads: int) -> Iterator[Link]:
    """Link row `2i + p` of a torchtitan head to row `p * half + i` on the Hub."""
    head, tail = shape[0] // heads, shape[1:]
    half, zeros = head // 2, (0,) * len(tail)
    dims = tuple(range(len(shape)))
    for start in range(0, shape[0], head):
        for part in range(2):
            stored = Box((start + part * half, *zeros), (half, *tail))
            placed = stepped((start + part, *zeros), (half, *tail), (2, *(1,) * len(tail)))
            yield Link(hub, stored, titan, placed, dims)


NAMESPACE = Namespace(to_hub, from_hub)
