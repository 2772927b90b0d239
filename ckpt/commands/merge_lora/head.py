"""Bases for adapters trained with a head: PEFT saves the whole head with the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.adapters import names
from ckpt.adapters.names import parse_name
from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.commands.merge_lora.find import Adapter
from ckpt.plan import services
from ckpt.plan.checkpoint import MODEL_ROLES, WEIGHT, Checkpoint, Key
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.precision import model_dtypes
from ckpt.plan.tensors import Extent, Tensor, Whole
from ckpt.state.kept_dtypes import quantized_parts

if TYPE_CHECKING:
    from ckpt.plan.protocols import ModelClassProtocol

#: Tasks without a head in any pretrained base.
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
#: From the model and from its trainer.
_LABELS, _OF_TRAINER = ("id2label", "label2id"), ("problem_type", "pad_token_id")
_HEAD = "head:"
_SHOWN = 4


@dataclass(frozen=True)
class TrainedBase:
    base: Checkpoint
    entries: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def as_trained(base: Checkpoint, adapter: Adapter) -> TrainedBase:
    """Return `base` in the adapter's recorded model class. `base` uses transformers' names.

    Raise LossError if one of the class's tensors is missing from both.
    """
    raw = adapter.config.raw
    mapping = raw.get("auto_mapping")
    recorded = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    task = raw.get("task_type")
    if not (task in _CLASSIFIERS or _has_other_names(base, adapter)):
        return TrainedBase(base)
    cls = services.classes.trained_class(base.config, task, recorded)
    if cls is None:
        return TrainedBase(base)
    if quantized_parts(base):
        raise UsageError(
            f"can't add a head to a quantized base: the adapter was trained on {cls.name}",
            path=base.path,
            hint=Message("give the full-precision model with {base}")
            + (Message("; or {dequantize=True}") if services.dequantizing.can_dequantize(base) else ""),
        )
    return _class_model(base, adapter, cls)


def _has_other_names(base: Checkpoint, adapter: Adapter) -> bool:
    known = base.shapes.keys() | base.ties.keys()
    return any(_parameter(fqn) not in known for fqn in adapter.factors)


def _parameter(fqn: str) -> str:
    name = parse_name(fqn)
    if name.kind == names.SAVED:
        return f"{name.module}.{name.rest}"
    return name.module if name.kind == names.BASE else f"{name.module}.weight"


def _class_model(base: Checkpoint, adapter: Adapter, cls: ModelClassProtocol) -> TrainedBase:
    whole = {
        _parameter(fqn): factor
        for fqn, factor in adapter.factors.items()
        if parse_name(fqn).kind in (names.SAVED, names.BASE)
    }
    held = base.shapes
    num_labels = cls.num_labels({**held, **{fqn: factor.shape for fqn, factor in whole.items()}})
    shapes = cls.shapes(num_labels)
    renamed = {
        own: fqn
        for fqn, shape in shapes.items()
        if (own := next((name for name in _spellings(fqn, cls.prefix) if held.get(name) == shape), None))
    }
    taken = [fqn for fqn in shapes if fqn not in renamed.values() and fqn in whole]
    missing = sorted(shapes.keys() - renamed.values() - set(taken))
    if missing:
        raise LossError(
            f"the adapter was trained on {cls.name}, and tensors are in neither the adapter nor the base",
            path=adapter.path,
            fqn=missing[0],
            expected=f"{pluralize(len(shapes), 'tensor')} in {cls.name}",
            found=f"{len(missing)} missing: {_first_of(missing)}",
            hint=Message(
                "transformers initialized it randomly for training: give the {} from training with {base}", cls.name
            ),
        )
    counts = model_dtypes(base, None)
    dtype = max(counts, key=lambda one: (counts[one], one.name), default=FLOAT32)
    tensors: dict[Key, Tensor] = {
        (renamed[fqn], role): tensor.renamed(renamed[fqn])
        for (fqn, role), tensor in base.tensors.items()
        if fqn in renamed and role in MODEL_ROLES
    }
    for fqn in taken:
        extent = Extent.contiguous(f"{_HEAD}{fqn}", 0, dtype, shapes[fqn])
        tensors[fqn, WEIGHT] = Tensor(fqn, WEIGHT, dtype, shapes[fqn], Whole(extent))
    spelled = {name: fqn for fqn in cls.optional for name in _spellings(fqn, cls.prefix)}
    ties = {spelled[a]: renamed[o] for a, o in base.ties.items() if a in spelled and o in renamed}
    entries = {"architectures": [cls.name], **_label_entries(base, adapter, num_labels)}
    left = sorted({fqn for fqn, role in base.tensors if role in MODEL_ROLES} - renamed.keys())
    note = f"the model is {cls.name}, as the adapter records"
    if taken:
        note += f"; from the adapter: {_first_of(taken)}"
    if left:
        note += f"; left out of the base: {_first_of(left)}"
    config = {**(base.config or {}), **entries}
    return TrainedBase(replace(base, tensors=tensors, ties=ties, config=config), entries, (note,))


def _first_of(fqns: Sequence[str]) -> str:
    return ", ".join(fqns[:_SHOWN]) + (f" and {len(fqns) - _SHOWN} more" if fqns[_SHOWN:] else "")


def _spellings(fqn: str, prefix: str) -> Iterator[str]:
    """Yield names with and without the inner model's path."""
    yield fqn
    if prefix:
        yield fqn.removeprefix(f"{prefix}.") if fqn.startswith(f"{prefix}.") else f"{prefix}.{fqn}"


def _label_entries(base: Checkpoint, adapter: Adapter, num_labels: int | None) -> dict[str, Any]:
    """Take the config next to the adapter, or transformers' default labels."""
    recorded = adapter.checkpoint.config or {}
    entries = {key: recorded[key] for key in _OF_TRAINER if recorded.get(key) is not None}
    if num_labels is None or len((base.config or {}).get("id2label") or (0, 1)) == num_labels:
        return entries
    if len(recorded.get("id2label") or ()) == num_labels:
        return entries | {key: recorded[key] for key in _LABELS if key in recorded}
    labels = [f"LABEL_{number}" for number in range(num_labels)]
    by_number = {str(number): label for number, label in enumerate(labels)}
    return entries | {"id2label": by_number, "label2id": {label: number for number, label in enumerate(labels)}}
