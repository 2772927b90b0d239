"""GPT-NeoX's own names where it has no pipeline (`pipe_parallel_size` 0): `sequential.N.` and layer N's own."""

from __future__ import annotations

from dataclasses import replace

from ckpt.base.errors import LossError
from ckpt.base.text import Brief
from ckpt.plan.checkpoint import MEGATRON, Checkpoint
from ckpt.plan.relation import Relation, translate
from converters.names.megatron import relation as megatron
from converters.names.megatron.layers import Layers, is_recomputed, sequential


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether a model's names are GPT-NeoX's, and its config is of that architecture."""
    is_neox = (checkpoint.config or {}).get("model_type") == "gpt_neox"
    return is_neox and bool(checkpoint.tensors) and all(sequential(fqn) for fqn, _ in checkpoint.tensors)


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, which has GPT-NeoX's names, under those of the Hub.

    Raises LossError for a tensor that is in no layer of GPT-NeoX's, and what Megatron's relation to the Hub raises.
    """
    shapes = checkpoint.shapes
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
            raise LossError("nothing is known of this entry of a layer", path=checkpoint.path, fqn=fqn)
    relation = Relation.renaming(canonical, shapes)
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in left}
    named = translate(replace(checkpoint, tensors=tensors), relation, MEGATRON)
    notes: list[str] = [Brief("the names are GPT-NeoX's without a pipeline, which are related to those of its layers")]
    if left:
        notes.append("rotary frequencies (rotary_emb.inv_freq) are left out: every model computes them")
    return megatron.to_hub(replace(named, ties={}, notes=(*checkpoint.notes, *notes)))
