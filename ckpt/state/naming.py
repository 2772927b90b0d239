"""A checkpoint under the names of another namespace."""

from __future__ import annotations

from dataclasses import replace

from ckpt.base.errors import NotFoundError
from ckpt.plan import registry
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, Checkpoint, Layout
from ckpt.plan.namespace import OF_THE_MODEL, TORCHTITAN, in_words


def to_namespace(checkpoint: Checkpoint, namespace: str | None, layout: Layout | None = None) -> Checkpoint:
    """`checkpoint` under the names of `namespace`, where the two are related and differ.

    Every way leads over the Hub's names; `layout` decides what a namespace leaves open, as how far Megatron's
    vocabulary is padded.  Raises LossError where a relation does not place a tensor, NotFoundError where it takes a
    config and none is there.
    """
    layout = layout or Layout()
    if checkpoint.is_adapter and namespace != checkpoint.namespace:
        checkpoint = _adapter_in(checkpoint, namespace, layout)
    if namespace is None or namespace == OWN:
        return checkpoint
    if namespace == checkpoint.namespace:
        return checkpoint if namespace in OF_THE_MODEL else registry.namespace(namespace).adapted(checkpoint, layout)
    if checkpoint.namespace == TORCHTITAN and namespace == TRANSFORMERS:
        return checkpoint  # a run's own names, whichever framework's, are what it goes on under
    if not {checkpoint.namespace, namespace} <= OF_THE_MODEL:
        checkpoint = _with_known_names(checkpoint, namespace)
    if checkpoint.namespace in (OWN, namespace):
        return checkpoint
    if checkpoint.namespace != HUB:
        checkpoint = registry.namespace(checkpoint.namespace).to_hub(checkpoint)
    return checkpoint if namespace == HUB else registry.namespace(namespace).from_hub(checkpoint, layout)


def _adapter_in(checkpoint: Checkpoint, namespace: str | None, layout: Layout) -> Checkpoint:
    """An adapter under the names that `namespace` has for adapters: its own, or those of PEFT's files."""
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
    """`checkpoint` with the names of its config's architecture; NotFoundError if there is no config that tells it."""
    model_type = (checkpoint.config or {}).get("model_type")
    if not model_type:
        raise NotFoundError(
            f"it needs the model's config.json to turn {in_words(checkpoint.namespace)} into {in_words(namespace)}",
            path=checkpoint.path,
            expected="a config.json with a model_type",
            found="none beside the checkpoint" if checkpoint.config is None else "a config.json without a model_type",
            hint="--config takes the folder of a config.json, or a Hub id",
        )
    return replace(checkpoint, namespace=TRANSFORMERS) if checkpoint.namespace == OWN else checkpoint


def as_hub(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` under the Hub's names, where its config names an architecture; an adapter under PEFT's."""
    if checkpoint.is_adapter:
        return to_namespace(checkpoint, OWN)
    if checkpoint.namespace == OWN and checkpoint.config and checkpoint.config.get("model_type"):
        checkpoint = replace(checkpoint, namespace=TRANSFORMERS)
    return to_namespace(checkpoint, HUB)
