"""Checkpoint content that `verify` does not compare or `hash` does not cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.base.text import one_line, pluralize
from ckpt.compare.other_files import differing_files, first_names
from ckpt.containers.torchfile.tree import tensors_in
from ckpt.plan.checkpoint import HUB, Checkpoint, OneElement
from ckpt.runs.unread_files import STATE, list_unread
from ckpt.state.same_model import loaded_otherwise, stated_otherwise

WHY = "they are outside the model and the optimizer; use `ckpt verify --run` to compare them"
_RANDOM = ("rng", "random")


def count_state_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """Count tensors by training state entry, without random states and single numbers."""
    entries = checkpoint.state.entries()
    named = {name: value for name, value in entries.items() if not any(word in name.lower() for word in _RANDOM)}
    found = {}
    for name in named.keys() - checkpoint.state.per_rank.keys():
        sizes = [tensor.extent.numel for tensor in tensors_in(named[name])]
        if max(sizes, default=0) > 1:
            found[name] = len(sizes)
    return dict(sorted(found.items()))


def not_tensors(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    for label, side in (("A", a), ("B", b)):
        if names := [one.name for one in list_unread(side) if one.kind == STATE]:
            yield f"not compared, of {label}: {first_names(names)}: no reader opened {'them' if names[1:] else 'it'}"
    differing = [*stated_otherwise(a.config, b.config, alone=True)]
    if {a.namespace, b.namespace} == {HUB}:  # a run's config is for its own class and precision
        differing += loaded_otherwise(a.config or {}, b.config or {})
    if entries := [_entry(*one) for one in differing]:
        yield f"only tensors are compared, and the configs differ between A and B: {first_names(entries)}"
    yield from differing_files(a, b)


def _entry(name: str, one: Any, other: Any) -> str:
    if None not in (one, other):
        return f"{name} {one!r} and {other!r}"
    return f"{name} {other!r} only in B" if one is None else f"{name} {one!r} only in A"


def not_hashed(checkpoint: Checkpoint, named: Checkpoint) -> list[str]:
    """Return sentences on parts without a digest. `named` has the Hub's names."""
    found = [
        f"{pluralize(n, 'tensor')} of {one_line(name)}: {WHY}" for name, n in count_state_tensors(checkpoint).items()
    ]
    for role, values in checkpoint.state.scalars.items():
        plain = [one.value if isinstance(one, OneElement) else one for one in values.values()]
        if num_others := sum(one is not None and not isinstance(one, int | float) for one in plain):
            found.append(
                f"optimizer state {one_line(role)} of {pluralize(num_others, 'parameter')}: it is not a number"
            )
    left = [note for note in named.notes if note not in checkpoint.notes]  # tensors without a name on the Hub
    if left and _num_elements(named) == _num_elements(checkpoint):  # only renamed
        left = []
    return [f"not in the digests: {sentence}" for sentence in (*found, *map(one_line, (*left, *checkpoint.unread)))]


def _num_elements(checkpoint: Checkpoint) -> int:
    return sum(tensor.numel for tensor in checkpoint.tensors.values())
