"""Names of a model of transformers' inside another module: Lightning's `_forward_module.model.`, or any prefix.

Lightning (2.5, `strategies/deepspeed.py`, `fabric/wrappers.py`) saves a model under the names that its own modules
give: `_forward_module.` of its wrapper, and the attribute of the LightningModule that the model is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint
from ckpt.plan.relation import Relation, translate
from converters.names.families import tables as families
from converters.names.hub import saving as asked
from converters.names.transformers import relation as transformers

#: The module of TRL's models with a value head that stands next to the model.
_VALUE_HEAD = "v_head"


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    """Rename `checkpoint` from transformers' module names, possibly behind a prefix, to the Hub's names."""
    return transformers.to_hub(unwrapped(checkpoint))


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Remove a prefix that all names of `checkpoint` have and the names of the config's architecture lack."""
    names = {fqn for fqn, role in checkpoint.tensors if role in MODEL_ROLES}
    prefix = _prefix(names, checkpoint.config or {})
    if not prefix:
        return checkpoint
    shapes = checkpoint.shapes
    relation = Relation.renaming({name: name.removeprefix(prefix) for name in shapes}, shapes)
    count = "all" if all(name.startswith(prefix) for name in names) else "most"
    note = f"{count} names begin with {prefix!r}, which is left out: the config's architecture has no such module"
    named = translate(checkpoint, relation, checkpoint.namespace)
    return replace(named, notes=(*checkpoint.notes, note))


def _prefix(names: Collection[str], config: Mapping[str, Any]) -> str:
    """Return the prefix of whole modules that all `names` share and no name of the architecture has.

    Names of modules next to the model may lack it: of a Sequential's other modules, as in sentence-transformers, and of
    TRL's value head.
    """
    parts = {name.partition(".")[0] for name in names}
    inside = {one for one in parts if one == "0"} if parts and all(map(str.isdecimal, parts)) else parts - {_VALUE_HEAD}
    if len(inside) == 1 < len(parts):
        names = [name for name in names if name.partition(".")[0] in inside]
    # what the first and the last in order have in common, all between them have
    first, last = min(names, default="").split("."), max(names, default="").split(".")
    count = next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
    prefixes = [".".join((*first[:end], "")) for end in range(1, count + 1)]
    if not prefixes or any(name.startswith("base_model.model.") for name in names):
        return ""
    known = _known(config)
    if any(name in known for name in names):
        return ""
    fitting = {prefix: sum(name.removeprefix(prefix) in known for name in names) for prefix in prefixes}
    best = max(prefixes, key=fitting.__getitem__)
    return best if fitting[best] else ""


def _known(config: Mapping[str, Any]) -> Collection[str]:
    """Names of the architecture: by its table, in which those of memory differ in experts alone, or in memory."""
    try:
        table = families.saved(config)
        return asked.names_in_memory(config) if table is None else table.required
    except CkptError:
        return ()  # whoever needs the config says what is wrong with it


NAMESPACE = replace(transformers.NAMESPACE, to_hub=to_hub)
