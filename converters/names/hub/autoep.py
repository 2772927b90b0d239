"""Names of experts under DeepSpeed's AutoEP, which puts a layer of its own in the place of transformers' MoE block.

    mlp.experts.w1, w3     [experts, intermediate, hidden]: gates and ups, one matrix `gate_up_proj` in transformers 5
    mlp.experts.w2         [experts, hidden, intermediate]: `down_proj`
    mlp.router.gate.weight, again as mlp.gate.gate.weight: `mlp.gate.weight`

Format facts: deepspeed 0.19.8 (module_inject/auto_ep_layer.py, moe/ep_experts.py), tried with qwen3_moe.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpt.base.text import Brief
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, whole

_MODEL_TYPES = ("qwen3_moe",)
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)w([123])")
_ROUTER, _AGAIN = ".mlp.router.gate.weight", ".mlp.gate.gate.weight"


def as_in_transformers(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` under the names of transformers' own modules, if its experts have AutoEP's."""
    if (checkpoint.config or {}).get("model_type") not in _MODEL_TYPES:
        return checkpoint
    shapes = checkpoint.shapes
    if not any(map(_EXPERTS.fullmatch, shapes)):
        return checkpoint
    copies = {fqn: fqn.replace(_AGAIN, _ROUTER) for fqn in shapes if fqn.endswith(_AGAIN)}
    links = [_link(fqn, shape) for fqn, shape in shapes.items() if copies.get(fqn) not in shapes]
    after: dict[str, Shape] = {}
    for link in links:
        ends = (offset + size for offset, size in zip(link.b_box.offsets, link.b_box.sizes, strict=True))
        after[link.b] = tuple(map(max, ends, after.get(link.b, (0,) * len(link.b_box.sizes))))
    kept = {alias: owner for alias, owner in copies.items() if owner in shapes}
    named = translate(checkpoint, Relation(tuple(links), shapes, after, a_copies=kept), checkpoint.namespace)
    ties = {alias: owner for alias, owner in named.ties.items() if not alias.endswith((_AGAIN, _ROUTER))}
    note = Brief("the experts have DeepSpeed's AutoEP's names, which are related to those of transformers' modules")
    return replace(named, ties=ties, notes=(*named.notes, note))


def _link(fqn: str, shape: Shape) -> Link:
    match = _EXPERTS.fullmatch(fqn)
    if match is None:
        return Link.rename(fqn, re.sub(r"\.mlp\.(router|gate)\.gate\.weight$", ".mlp.gate.weight", fqn), shape)
    if match[2] == "2":
        return Link.rename(fqn, f"{match[1]}down_proj", shape)
    box = Box((0, 0 if match[2] == "1" else shape[1], 0), shape)
    return Link(fqn, whole(shape), f"{match[1]}gate_up_proj", box, (0, 1, 2))
