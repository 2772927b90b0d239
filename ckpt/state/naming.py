"""Tensor names: translation to another namespace, and removal of model wrappers' prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.base.words import Message
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, Checkpoint, Layout
from ckpt.plan.namespace import OF_RUNS, OF_THE_MODEL, in_words
from ckpt.plan.relation import Relation, translate


def to_namespace(checkpoint: Checkpoint, namespace: str | None, layout: Layout | None = None) -> Checkpoint:
    """Return `checkpoint` with its names translated to `namespace`, if they differ and are related.

    `layout` supplies choices, for example the padding of Megatron's vocabulary. Raise LossError if a relation has no
    place for a tensor, NotFoundError if a needed config is missing.
    """
    layout = layout or Layout()
    if checkpoint.is_adapter and namespace != checkpoint.namespace:
        checkpoint = _adapter_in(checkpoint, namespace, layout)
    if namespace is None or namespace == OWN:
        return checkpoint
    if namespace == checkpoint.namespace:
        return checkpoint if namespace in OF_THE_MODEL else registry.namespace(namespace).adapted(checkpoint, layout)
    if checkpoint.namespace in OF_RUNS and namespace == TRANSFORMERS:
        return checkpoint  # a run keeps its framework's names
    if not {checkpoint.namespace, namespace} <= OF_THE_MODEL:
        checkpoint = _with_known_names(checkpoint, namespace)
    if checkpoint.namespace in (OWN, namespace):
        return checkpoint
    if checkpoint.namespace == TRANSFORMERS:
        checkpoint = services.layer_names.with_known_names(checkpoint)
    if checkpoint.namespace != HUB:
        checkpoint = registry.namespace(checkpoint.namespace).to_hub(checkpoint)
    return checkpoint if namespace == HUB else registry.namespace(namespace).from_hub(checkpoint, layout)


def _adapter_in(checkpoint: Checkpoint, namespace: str | None, layout: Layout) -> Checkpoint:
    if checkpoint.namespace not in OF_THE_MODEL:
        to_peft = registry.namespace(checkpoint.namespace).adapter_to_peft
        assert to_peft is not None
        checkpoint = to_peft(_with_known_names(checkpoint, HUB))
    if namespace is None or namespace in OF_THE_MODEL:
        return checkpoint
    from_peft = registry.namespace(namespace).adapter_from_peft
    if from_peft is None:
        return checkpoint
    _with_known_names(checkpoint, namespace)
    return from_peft(checkpoint, layout)


def _with_known_names(checkpoint: Checkpoint, namespace: str) -> Checkpoint:
    """Raise NotFoundError without a config that names the architecture."""
    model_type = (checkpoint.config or {}).get("model_type")
    if not model_type:
        raise NotFoundError(
            f"it needs the model's config.json to turn {in_words(checkpoint.namespace)} into {in_words(namespace)}",
            path=checkpoint.path,
            expected="a config.json with a model_type",
            found="no config.json next to the checkpoint"
            if checkpoint.config is None
            else "a config.json without a model_type",
            hint=Message("give the folder of a config.json, or a Hub id, with {config}"),
        )
    return replace(checkpoint, namespace=TRANSFORMERS) if checkpoint.namespace == OWN else checkpoint


def as_hub(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` under the Hub's names if its config names an architecture. An adapter gets PEFT's names."""
    if checkpoint.is_adapter:
        return to_namespace(checkpoint, OWN)
    if checkpoint.namespace == OWN and checkpoint.config and checkpoint.config.get("model_type"):
        checkpoint = replace(checkpoint, namespace=TRANSFORMERS)
    return to_namespace(checkpoint, HUB)


#: After a dot or at the start. A literal begins it, because `re` finds one faster than a lookbehind.
_INNER = re.compile(r"_(?<![^.]_)(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
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
    names = {fqn for fqn, _ in checkpoint.tensors} | checkpoint.ties.keys()
    if not _INNER.search("\n.".join(names)):  # faster than a search per name
        return checkpoint
    note = "left out wrapper prefixes (torch.compile) from the model's names, like torch's state dicts"
    named = _renamed(checkpoint, clean_names(names, checkpoint.path))
    return replace(named, notes=(*checkpoint.notes, note))


def with_trainers_prefix(
    checkpoint: Checkpoint, prefix: str | None, others: tuple[str, ...], *, splits_modules: bool
) -> Checkpoint:
    """Name the tensors as sentence-transformers' trainer does, and add a note if that renames any.

    `others` are the prefixes of other modules. `splits_modules` is True for formats with a folder for each module:
    they have the model's own names.
    """
    if prefix is None or (checkpoint.namespace == OWN and not splits_modules):
        return checkpoint
    names = {fqn for fqn, _ in checkpoint.tensors} | checkpoint.ties.keys()
    is_named = any(name.startswith(prefix) for name in names)
    if is_named != splits_modules:
        return checkpoint
    if splits_modules:
        return _renamed(checkpoint, {name: name.removeprefix(prefix) for name in names})
    note = f"put {prefix!r} before the model's names, like SentenceTransformerTrainer of the release in modules.json"
    named = _renamed(checkpoint, {name: name if name.startswith(others) else prefix + name for name in names})
    return replace(named, notes=(*checkpoint.notes, note))


def _renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    shapes = checkpoint.shapes
    ties = {names[alias]: names[owner] for alias, owner in checkpoint.ties.items()}
    relation = Relation.renaming({name: names[name] for name in shapes}, shapes)
    return replace(translate(replace(checkpoint, ties={}), relation, checkpoint.namespace), ties=ties)
