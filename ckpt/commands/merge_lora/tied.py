"""Adapters on tied weights, and the ties they break.

PEFT's `merge_and_unload` adds one layer's change to a shared tensor, so the result is not the trained model
(peft#2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt.adapters import names
from ckpt.base.words import Note
from ckpt.commands.merge_lora.find import Factor
from ckpt.plan import services
from ckpt.plan.checkpoint import TRANSFORMERS, Checkpoint
from ckpt.state.naming import to_namespace

Parts = Mapping[str, Factor]


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Use transformers' names, with aliases that the files don't store."""
    named = to_namespace(checkpoint, TRANSFORMERS)
    if named.config is None or not named.ties:
        return named
    declared, stored = services.ties.declared_ties(named.config), {fqn for fqn, _ in named.tensors}
    ties = {alias: owner for alias, owner in declared.items() if owner in stored and alias not in stored}
    others = {alias: owner for alias, owner in named.ties.items() if owner not in ties.values()}
    return replace(named, ties=ties | others)


def is_divided(members: Sequence[str], changes: Mapping[str, Parts]) -> bool:
    """Return True if `changes` leave the layers `members`, with one shared weight, different.

    The input embedding comes first: PEFT writes its trained rows into all members. With `ensure_weight_tying`, PEFT
    gives all members the same factors.
    """
    parts = [_linear_factors(part) for part in changes.values()]
    if are_rows(changes):
        is_whole = members[0] in changes or not changes
    else:
        is_whole = changes.keys() == set(members) and all(part.keys() == {names.A, names.B} for part in parts)
    return not (is_whole and _are_equal(parts))


def are_rows(changes: Mapping[str, Parts]) -> bool:
    return all(part.keys() == {names.TOKENS} for part in changes.values())


def notes(divided: Mapping[str, Sequence[str]], shared: Mapping[str, Sequence[str]], *, as_peft: bool) -> Iterator[str]:
    """Note merges that a tied weight makes differ from PEFT's, or from training (see `effect.Noted`)."""
    for path, modules in divided.items():
        changed = _in_words(modules)
        if as_peft:
            yield (
                f"{changed} of {path}: changed every weight tied to it, like PEFT's merge_and_unload; "
                "the result is not the trained model"
            )
        else:
            what = f"{changed} of {path}: as trained, the weights tied to it stay unchanged"
            yield Note("{}; {as_peft=True} changes them too, like PEFT's merge_and_unload", what)
    for path, modules in shared.items():
        what = f"{_in_words(modules)} of {path}: as trained, their tied weight changes once"
        yield Note("{}; PEFT's merge_and_unload adds the change once for each layer, and so does {as_peft=True}", what)


def _in_words(modules: Sequence[str]) -> str:
    return " and ".join(sorted(set(modules)))


def _linear_factors(parts: Parts) -> Parts:
    """Return a linear layer's factors for the same change as an embedding's."""
    turned = {names.EMBEDDING_A: names.B, names.EMBEDDING_B: names.A}
    return {turned.get(kind, kind): _transposed(one) if kind in turned else one for kind, one in parts.items()}


def _transposed(factor: Factor) -> Factor:
    return Factor(factor.fqn, factor.shape[::-1], lambda: factor.load().T, factor.of)


def _are_equal(changes: Sequence[Parts]) -> bool:
    return all(
        other.keys() == changes[0].keys() and all(is_equal(one, changes[0][kind]) for kind, one in other.items())
        for other in changes[1:]
    )


def is_equal(one: Factor, other: Factor) -> bool:
    return one.shape == other.shape and bool((one.load() == other.load()).all())
