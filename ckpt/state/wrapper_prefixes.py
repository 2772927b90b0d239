"""Prefixes from model wrappers in tensor names, in state dicts and adapter files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ckpt.base.errors import CorruptError
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.relation import Relation, translate

_INNER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: DistributedDataParallel and DataParallel.
_OUTER = "module."


def stripper(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that removes wrapper names. DDP's prefix is removed only if all `names` have it."""
    inner = [_INNER.sub("", name) for name in names]
    outer = _OUTER if inner and all(name.startswith(_OUTER) for name in inner) else ""
    return lambda name: _INNER.sub("", name).removeprefix(outer)


def clean_names(names: Collection[str], path: str) -> dict[str, str]:
    """Map each name to the name without wrappers."""
    strip = stripper(names)
    inner = {name: strip(name) for name in names}
    seen: dict[str, str] = {}
    for name, clean in inner.items():
        other = seen.setdefault(clean, name)
        if other != name:
            raise CorruptError(
                "two tensors have the same name without their wrappers", path=path, fqn=clean, found=f"{other}, {name}"
            )
    return inner


def without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Remove wrapper names, and add a note if there were any."""
    names = {*checkpoint.shapes, *checkpoint.ties}
    if not any(_INNER.search(name) for name in names):
        return checkpoint
    shapes, clean = checkpoint.shapes, clean_names(names, checkpoint.path)
    ties = {clean[alias]: clean[owner] for alias, owner in checkpoint.ties.items()}
    relation = Relation.renaming({name: clean[name] for name in shapes}, shapes)
    named = translate(replace(checkpoint, ties={}), relation, checkpoint.namespace)
    note = "left out wrapper prefixes (torch.compile) from the model's names, like torch's state dicts"
    return replace(named, ties=ties, notes=(*checkpoint.notes, note))
