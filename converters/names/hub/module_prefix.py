"""Names of a transformers model inside another module: Lightning's `_forward_module.model.`, or any prefix.

Lightning (2.5, `strategies/deepspeed.py`, `fabric/wrappers.py`): `_forward_module.` for the wrapper, and the
LightningModule's attribute with the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint
from ckpt.plan.relation import Relation, translate
from converters.names.families import encoders
from converters.names.families import tables as families
from converters.names.hub import save_pretrained
from converters.names.transformers import relation as transformers

#: Beside the model in TRL's models with a value head.
_VALUE_HEAD = "v_head"


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    return transformers.to_hub(unwrapped(checkpoint))


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Remove a prefix shared by all names but missing from the config's architecture."""
    names = {fqn for fqn, role in checkpoint.tensors if role in MODEL_ROLES}
    prefix = _prefix(names, checkpoint.config or {})
    if not prefix:
        return checkpoint
    shapes = checkpoint.shapes
    relation = Relation.renaming({name: name.removeprefix(prefix) for name in shapes}, shapes)
    count = "all" if all(name.startswith(prefix) for name in names) else "most"
    note = f"removed the prefix {prefix!r} from {count} names: the config's architecture has no module with this name"
    named = translate(checkpoint, relation, checkpoint.namespace)
    return replace(named, notes=(*checkpoint.notes, note))


def _prefix(names: Collection[str], config: Mapping[str, Any]) -> str:
    """Return the prefix of whole modules that all `names` share, but no name of the architecture has.

    A Sequential's other modules (sentence-transformers), and TRL's value head, may lack it.
    """
    parts = {name.partition(".")[0] for name in names}
    inside = {one for one in parts if one == "0"} if parts and all(map(str.isdecimal, parts)) else parts - {_VALUE_HEAD}
    if len(inside) == 1 < len(parts):
        names = [name for name in names if name.partition(".")[0] in inside]
    # shared by the first and last name, so by all
    first, last = min(names, default="").split("."), max(names, default="").split(".")
    count = next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
    prefixes = [".".join((*first[:end], "")) for end in range(1, count + 1)]
    if not prefixes or any(name.startswith("base_model.model.") for name in names):
        return ""
    known = _table_names(config)
    if any(name in known for name in names):
        return ""
    fitting = {prefix: sum(name.removeprefix(prefix) in known for name in names) for prefix in prefixes}
    best = max(prefixes, key=fitting.__getitem__)
    return best if fitting[best] else ""


def _table_names(config: Mapping[str, Any]) -> Collection[str]:
    """Return the architecture's names. Only experts' names differ in memory."""
    try:
        table = families.saved(config) or encoders.saved(config)
        return save_pretrained.names_in_memory(config) if table is None else table.required
    except CkptError:
        return ()  # reported elsewhere


NAMESPACE = replace(transformers.NAMESPACE, to_hub=to_hub)
