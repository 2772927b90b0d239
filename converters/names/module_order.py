"""Order in which a transformers model registers its parameters, used by optimizers to number them.

It follows from the rows of architectures with a table in `converters.names.megatron`. For others, the installed
transformers builds its own model without data.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import WEIGHT, Checkpoint
from ckpt.plan.tensors import Shape
from converters.names.families.tables import FAMILIES, saved
from converters.names.hub.proof import prove
from converters.names.megatron.relation import BUFFERS, architectures, table_of
from converters.names.megatron.table import Table
from converters.names.parameters import in_memory
from converters.names.transformers.order import as_registered
from converters.names.transformers.relation import build_model, relation
from converters.names.transformers.transformers_source import package


def in_order(hub: Checkpoint, memory: Checkpoint) -> list[str] | None:
    """Return in-memory names in registration order. None if the order is unknown.

    `hub` has the files' names, `memory` in-memory names. The order is unknown without a config, for an architecture
    that is unknown or has code of its own, or if it has other tensors.
    """
    config = hub.config or {}
    names = [fqn for fqn, role in memory.tensors if role == WEIGHT]
    model_type = str(config.get("model_type"))
    try:
        if _is_own_code(model_type):
            return None
        if model_type in architectures():
            prove(config, {tensor.fqn: tensor.shape for tensor in hub.with_role(WEIGHT)}, hub.path)
            return as_registered(names, model_type)
        if package() is None or find_spec("torch") is None:
            return None
        model = build_model(config, dict.fromkeys(names, ()))
    except CkptError:
        return None
    if model is None or not model.state_dict().keys() >= set(names):
        return None
    first_names = (memory.ties.get(name, name) for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in dict.fromkeys(first_names) if (name, WEIGHT) in memory.tensors]


def registered_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return parameters, tied ones once, or {} if unknown."""
    model_type = str(config.get("model_type"))
    if _is_own_code(model_type) or (model_type not in architectures() and find_spec("torch") is None):
        return {}
    try:
        if model_type not in architectures() or model_type not in FAMILIES:
            return {parameter.name: parameter.shape for parameter in in_memory(config).parameters}
        shapes = _table_parameters(config, table_of(model_type))
    except CkptError:
        return {}
    return {fqn: shapes[fqn] for fqn in as_registered(shapes, model_type)}


def _is_own_code(model_type: str) -> bool:
    """Return True if the class stands next to the model, where nothing proves its order."""
    return (family := FAMILIES.get(model_type)) is not None and family.own_code


def _table_parameters(config: Mapping[str, Any], table: Table) -> Mapping[str, Shape]:
    """Return the shapes in memory of a table's parameters, without its buffers."""
    found = saved(config)
    if found is None:
        return {}
    places = (place for place in table.places(table.family.sizes(config)) if place.megatron.endswith(BUFFERS))
    prefix = f"{found.base}."  # missing without a head
    buffers = {hub.removeprefix(prefix) for place in places for hub in place.hubs}
    shapes = {fqn: shape for fqn, shape in found.required.items() if fqn.removeprefix(prefix) not in buffers}
    memory = relation(config, shapes, "to_memory")
    return shapes if memory is None else memory.b_shapes
