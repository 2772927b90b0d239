"""`--complete-from`: fill a run's missing tensors from its base model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize, show_size
from ckpt.plan import services
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, Key
from ckpt.plan.namespace import config_parts
from ckpt.plan.tensors import Shape, Tensor
from ckpt.state.naming import as_hub
from ckpt.state.same_model import difference, stated_otherwise

#: Part of the model: up to the layer number, or the first two components.
_PART = re.compile(r"(?:[^.]+\.)*?layers\.\d+|[^.]+\.[^.]+|[^.]+")


def completed(run: Checkpoint, base: Checkpoint) -> Checkpoint:
    """Return `run` under the Hub's names, plus every tensor that only `base` has.

    The last note lists the added tensors. Raise UsageError if the models differ in kind, LossError if a shared tensor
    has another shape (except the number of vocabulary rows).
    """
    if (differing := difference(run.config, base.config)) is not None:
        key, one, other = differing
        raise UsageError(
            "this is not the run's base model",
            path=base.path,
            expected=f"{key} {one}",
            found=f"{key} {other}",
        )
    if run.is_adapter or base.is_adapter:
        raise UsageError("a model is completed from a model, and no adapter is one", path=run.path)
    run = as_hub(run)
    base = as_hub(replace(base, config=base.config or run.config))
    has, gives = (
        {fqn: tensor.shape for (fqn, role), tensor in of.tensors.items() if role in MODEL_ROLES} for of in (run, base)
    )
    _check_same(run, base, has, gives)
    tied = services.ties.tied_names(run.config, has) if run.config else {}
    lacks = gives.keys() - has.keys() - run.ties.keys() - tied.keys()
    taken = {key: tensor for key, tensor in base.tensors.items() if key[0] in lacks and key[1] in MODEL_ROLES}
    return replace(
        run,
        tensors={**run.tensors, **taken},
        computed={**base.computed, **run.computed},
        files=tuple({file.path: file for file in (*run.files, *base.files)}.values()),
        given=replace(run.given, places=tuple(dict.fromkeys((*run.given.places, base.path, *base.given.places)))),
        notes=(*run.notes, *(_notes_of_configs(run, base) if taken else ()), _note_of_taken(base.path, taken)),
    )


def _check_same(run: Checkpoint, base: Checkpoint, has: Mapping[str, Shape], gives: Mapping[str, Shape]) -> None:
    """Raise an error if shared tensors show that `base` is not the run's base model."""
    common = [fqn for fqn in has if fqn in gives]
    if not common:
        raise LossError("no name of the run is in this base", path=base.path, expected=next(iter(has), None))
    rows = {*_vocabularies(run.config), *_vocabularies(base.config)}
    for fqn in common:
        one, other = has[fqn], gives[fqn]
        is_resized = one[1:] == other[1:] and {one[:1], other[:1]} & {(size,) for size in rows}
        if one != other and not is_resized:
            raise LossError(
                "this is not the run's base model: a tensor has another shape",
                path=base.path,
                fqn=fqn,
                expected=f"shape {list(one)}",
                found=f"shape {list(other)}",
            )


def _vocabularies(config: Mapping[str, Any] | None) -> Iterable[int]:
    return [size for part in config_parts(config) if isinstance(size := part.get("vocab_size"), int)]


def _notes_of_configs(run: Checkpoint, base: Checkpoint) -> Iterator[str]:
    for entry, one, other in stated_otherwise(run.config, base.config):
        yield f"{entry} is {one!r} in the run's config.json, and {other!r} in {base.path}"


def _note_of_taken(path: str, taken: Mapping[Key, Tensor]) -> str:
    if not taken:
        return f"nothing was added from {path}: the run lacks nothing"
    parts: dict[str, list[Tensor]] = {}
    for (fqn, _), tensor in taken.items():
        match = _PART.match(fqn)
        parts.setdefault(match[0] if match else fqn, []).append(tensor)
    listed = ", ".join(
        f"{part} ({pluralize(len(of), 'tensor')}, {show_size(sum(tensor.nbytes for tensor in of))})"
        for part, of in parts.items()
    )
    return f"added unchanged from {path}, because the run lacks it: {listed}"
