"""Targets from a buggy writer that forgets one tensor. A plan must refuse each.

Only a comparison with the live engine's truth finds swapped slots between two tensors of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, WEIGHT, Checkpoint, Key, Slot, Target


def forgotten(checkpoint: Checkpoint, target: Target) -> Iterator[tuple[str, frozenset[Key]]]:
    placed = dict.fromkeys(slot.key for file in target.files for slot in file.slots if slot.extent.numel)
    for what, roles in (("parameter", (WEIGHT, MASTER)), ("buffer", (BUFFER,))):
        fqn = next((fqn for fqn, role in placed if role in roles), None)
        if fqn is not None:
            yield what, frozenset((fqn, role) for role in roles if (fqn, role) in checkpoint.tensors)
    states = (key for key in checkpoint.tensors if key[1] not in MODEL_ROLES and key in placed)
    if (state := next(states, None)) is not None:
        yield "optimizer state", frozenset({state})


def tampered(checkpoint: Checkpoint, target: Target, keys: Set[Key]) -> Iterator[tuple[str, Target]]:
    slots = [slot for file in target.files for slot in file.slots if slot.key in keys]
    yield "slots to zeros", _without(target, slots, "zeros")
    yield "slots to literals", _without(target, slots, "literals")
    yield "slots dropped", _without(target, slots, "")
    unexplained = {**target.left_out, **dict.fromkeys(keys, "")}
    yield "left out for no reason", replace(_without(target, slots, "zeros"), left_out=unexplained)
    filled = [slot for slot in slots if slot.extent.numel]
    owners = {slot.key for slot in filled}
    if (
        len(filled) > len(owners) == 1
        and sum(s.region.numel for s in filled) == checkpoint.tensors[filled[0].key].numel
    ):
        yield "one slot of several", _without(target, filled[-1:], "zeros")


def _without(target: Target, slots: list[Slot], instead: str) -> Target:
    files = []
    for file in target.files:
        gone = [slot.extent for slot in file.slots if any(slot is one for one in slots)]
        file = replace(file, slots=tuple(slot for slot in file.slots if not any(slot is one for one in slots)))
        if instead == "zeros":
            file = replace(file, zeros=(*file.zeros, *((extent.offset, extent.nbytes) for extent in gone)))
        if instead == "literals":
            file = replace(file, literals=(*file.literals, *((one.offset, bytes(one.nbytes)) for one in gone)))
        files.append(file)
    return replace(target, files=tuple(files))
