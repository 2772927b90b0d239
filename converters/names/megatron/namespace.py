"""Functions of the Megatron namespace: converting models and adapters to and from Megatron's names."""

from __future__ import annotations

from ckpt.plan.namespace import Namespace
from converters.names.megatron import adapter, relation
from converters.names.megatron.shapes_from_args import expected_shapes

NAMESPACE = Namespace(
    relation.to_hub,
    relation.to_megatron,
    relation.repadded,
    relation.with_same_padding,
    relation.padding,
    lambda checkpoint: bool(expected_shapes(checkpoint.state.args or {}, checkpoint.shapes)),
    adapter_to_peft=adapter.to_peft,
    adapter_from_peft=adapter.from_peft,
)
