"""Names of layers that replace transformers' own.

GPT-NeoX without a pipeline (`pipe_parallel_size` 0) has `sequential.N.` plus layer N's own names. AutoEP replaces
transformers' MoE block by its own layer:

    mlp.experts.w1, w3     [experts, intermediate, hidden]: gate and up, one matrix `gate_up_proj` in transformers 5
    mlp.experts.w2         [experts, hidden, intermediate]: `down_proj`
    mlp.router.gate.weight, again as mlp.gate.gate.weight: `mlp.gate.weight`

Format facts: deepspeed 0.19.8 (module_inject/auto_ep_layer.py, moe/ep_experts.py), tested with qwen3_moe.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpt.base.errors import LossError
from ckpt.base.text import Brief
from ckpt.plan.checkpoint import MEGATRON, Checkpoint
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, whole
from converters.deepspeed.pipeline.layers import Layers, is_recomputed, sequential

_AUTOEP_TYPES = ("qwen3_moe",)
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)w([123])")
_ROUTER, _AGAIN = ".mlp.router.gate.weight", ".mlp.gate.gate.weight"


def with_known_names(checkpoint: Checkpoint) -> Checkpoint:
    """Rename such layers: GPT-NeoX's to Megatron's names, AutoEP's to transformers'."""
    model_type = (checkpoint.config or {}).get("model_type")
    if model_type == "gpt_neox" and checkpoint.tensors and all(sequential(fqn) for fqn, _ in checkpoint.tensors):
        return _in_megatron(checkpoint, checkpoint.shapes)
    if model_type in _AUTOEP_TYPES and any(_EXPERTS.fullmatch(fqn) for fqn, _ in checkpoint.tensors):
        return _in_transformers(checkpoint, checkpoint.shapes)
    return checkpoint


def _in_megatron(checkpoint: Checkpoint, shapes: dict[str, Shape]) -> Checkpoint:
    places = {fqn: place for fqn in shapes if (place := sequential(fqn))}
    left = {fqn for fqn, (_, name) in places.items() if is_recomputed(name)}
    names: dict[int, list[str]] = {}
    for fqn, (number, name) in places.items():
        if fqn not in left:
            names.setdefault(number, []).append(name)
    layers = Layers.of_names(names, checkpoint.path)
    canonical: dict[str, str] = {}
    for fqn, (number, name) in places.items():
        if found := layers.canonical(number, name):
            canonical[fqn] = found
        elif fqn not in left:
            raise LossError("this layer entry is unknown", path=checkpoint.path, fqn=fqn)
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in left}
    named = translate(replace(checkpoint, tensors=tensors), Relation.renaming(canonical, shapes), MEGATRON)
    notes: list[str] = [Brief("the names are GPT-NeoX's names without a pipeline")]
    if left:
        notes.append("left out rotary frequencies (rotary_emb.inv_freq): every model computes them")
    return replace(named, ties={}, notes=(*checkpoint.notes, *notes))


def _in_transformers(checkpoint: Checkpoint, shapes: dict[str, Shape]) -> Checkpoint:
    copies = {fqn: fqn.replace(_AGAIN, _ROUTER) for fqn in shapes if fqn.endswith(_AGAIN)}
    links = [_link(fqn, shape) for fqn, shape in shapes.items() if copies.get(fqn) not in shapes]
    after: dict[str, Shape] = {}
    for link in links:
        ends = (offset + size for offset, size in zip(link.b_box.offsets, link.b_box.sizes, strict=True))
        after[link.b] = tuple(map(max, ends, after.get(link.b, (0,) * len(link.b_box.sizes))))
    kept = {alias: owner for alias, owner in copies.items() if owner in shapes}
    named = translate(checkpoint, Relation(tuple(links), shapes, after, a_copies=kept), checkpoint.namespace)
    ties = {alias: owner for alias, owner in named.ties.items() if not alias.endswith((_AGAIN, _ROUTER))}
    note = Brief("the experts have DeepSpeed AutoEP's names")
    return replace(named, ties=ties, notes=(*named.notes, note))


def _link(fqn: str, shape: Shape) -> Link:
    match = _EXPERTS.fullmatch(fqn)
    if match is None:
        return Link.rename(fqn, re.sub(r"\.mlp\.(router|gate)\.gate\.weight$", ".mlp.gate.weight", fqn), shape)
    if match[2] == "2":
        return Link.rename(fqn, f"{match[1]}down_proj", shape)
    box = Box((0, 0 if match[2] == "1" else shape[1], 0), shape)
    return Link(fqn, whole(shape), f"{match[1]}gate_up_proj", box, (0, 1, 2))
