"""Name for a tied tensor in a Hub model's files.

transformers writes a tied tensor once, under a name that the model class's `_tied_weights_keys` does not list as an
alias (transformers 5.23, `modeling_utils.py`, `remove_tied_weights_from_state_dict`). Engines record ties in any
direction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint
from converters.names.transformers.transformers_source import (
    all_tied_weights,
    chosen_inside,
    computes_by_tie,
    model_types,
    ties_by_default,
)

#: Aliases if transformers is not installed or does not know the class.
_HEADS = re.compile(r"(.*\.)?(lm_head|lm_head\.decoder|embed_out)\.weight")
_TIE = "tie_word_embeddings"


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    stated = config.get(_TIE)
    if stated is None:
        model_type = config.get("model_type")
        return isinstance(model_type, str) and ties_by_default(model_type)
    return bool(stated)


def declared_ties(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return aliases, with owners if known. Inner models follow their own configs."""
    ties = (all_tied_weights(config) or {}) if ties_embeddings(config) else {}
    for attribute, inner in chosen_inside(config).items():
        within = declared_ties(inner).items()
        ties = {**ties, **{f"{attribute}.{alias}": owner and f"{attribute}.{owner}" for alias, owner in within}}
    return ties


def kept_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Map recorded owners to names in a Hub model's files.

    The owner keeps its name if the model is not from the Hub, or if an alias is stored, too.
    """
    config, ties = checkpoint.config, checkpoint.ties
    if not ties:
        return {}
    known = all_tied_weights(config) if config else None
    # An output head keeps its role under any name: gpt_neox's is `lm_head` in memory, `embed_out` on the Hub.
    heads = known is None or any(_HEADS.fullmatch(alias) for alias in known)
    aliases = [re.compile(pattern) for pattern in {**(known or {}), **(declared_ties(config) if config else {})}]
    is_hub = config is not None and next(model_types(config), None) is not None
    stored = {fqn for fqn, _ in checkpoint.tensors}

    def is_alias(name: str) -> bool:
        return any(a.search(name) for a in aliases) or (is_hub and heads and bool(_HEADS.fullmatch(name)))

    groups: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        groups.setdefault(owner, [owner]).append(alias)
    kept = {}
    for owner, names in groups.items():
        free = [name for name in names if not is_alias(name)]
        alone = stored.isdisjoint(name for name in names if name != owner)
        kept[owner] = free[0] if free and alone else owner
    return kept


def tied_names(config: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
    """Map aliases left out of a Hub model's files to their owners."""
    return {
        alias: owner
        for alias, owner in _in_files(config, stored)
        if owner is not None and owner in stored and alias not in stored and re.fullmatch(r"[\w.]+", alias)
    }


def _in_files(config: Mapping[str, Any], stored: Collection[str]) -> list[tuple[str, str | None]]:
    """Return declared ties. The files have other names than the class if a text model is a part."""
    from converters.names.families.composites import COMPOSITES

    declared = declared_ties(config)
    composite = COMPOSITES.get(str(config.get("model_type")))
    if composite is None or any(owner in stored for owner in declared.values()):
        return [*declared.items()]
    return [(composite.current(alias), owner and composite.current(owner)) for alias, owner in declared.items()]


def trained_apart(checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """Return aliases, in-memory names, with the stored names of both: the config ties them, but each has states."""
    config, trained = checkpoint.config, {fqn for fqn, role in checkpoint.tensors if role not in (WEIGHT, BUFFER)}
    pairs = zip(declared_ties(config), _in_files(config, trained), strict=True) if config and trained else ()
    return {name: (alias, owner) for name, (alias, owner) in pairs if owner and {alias, owner} <= trained}


def untied_config(config: Mapping[str, Any], aliases: Collection[str]) -> dict[str, Any] | None:
    """Untie `aliases`, in-memory names, in `config`.

    Return None if no config of this architecture computes the same without these ties.
    """
    tied = declared_ties(config)
    if any(map(computes_by_tie, model_types(config))) and not tied.keys().isdisjoint(aliases):
        return None
    changed = {**config, _TIE: False}
    apart = chosen_inside(config)
    for key, part in config.items():  # transformers 4 reads the text model's entry, and transformers 5 forwards it
        if not (isinstance(part, Mapping) and part.get("model_type") and (_TIE in part or "vocab_size" in part)):
            continue
        names = [name for name, inner in apart.items() if inner == {**part, "architectures": inner["architectures"]}]
        inside = [alias.removeprefix(f"{name}.") for name in names for alias in aliases if alias.startswith(f"{name}.")]
        if names and not inside:
            continue
        changed[key] = {**part, _TIE: False}
    return None if not declared_ties(changed).keys().isdisjoint(aliases) else changed
