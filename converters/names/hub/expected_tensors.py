"""Parts in a model's config that are missing from its checkpoint.

For most models transformers drops the multi-token prediction layers on saving, and an engine never saves a frozen part
that it does not hold. Writers don't notice, but servers fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, WEIGHT, Checkpoint
from ckpt.plan.namespace import config_parts
from ckpt.plan.tensors import Shape
from ckpt.runs.sentence_modules import modules_in
from ckpt.state.naming import as_hub
from converters.names.families import composites, encoders, tables
from converters.names.hub.proof import PEFT, Differences, closest_table, tables_differ
from converters.quantized.parts import UNKNOWN_SHAPE, is_part_name, quantized_weights

#: Config keys for the number of multi-token prediction layers: DeepSeek, GLM and MiMo; Qwen; Megatron; MiniMax;
#: Inkling.
_PREDICTION = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_modules",
    "num_mtp_layers",
)
_PREDICTED = re.compile(r"(^|[._])(mtp|nextn|eh_proj)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Model parts by config key, with a pattern for their tensor names.
_TOWERS = {
    "vision_config": ("a vision tower", re.compile(r"vis(ion|ual)|image|img")),
    "audio_config": ("an audio tower", re.compile(r"audio|speech")),
}


def missing_content(checkpoint: Checkpoint) -> tuple[list[str], list[str], list[str]]:
    """Return `missing_parts`, sentences on wrong or missing tensors, and sentences on names that only code can explain.

    In-memory names are converted by a table, without a slow import of transformers.
    """
    is_in_memory = checkpoint.namespace in (OWN, TRANSFORMERS) and not checkpoint.is_adapter
    if is_in_memory and has_list(checkpoint.config):
        with suppress(CkptError):
            checkpoint = as_hub(checkpoint)
    weights = quantized_weights(checkpoint)
    shapes = weights.in_place(checkpoint.shapes)
    parts, tensors, renamed = missing_parts(checkpoint.config, shapes), list[str](), list[str]()
    if checkpoint.namespace != HUB or checkpoint.is_adapter or any(name.startswith(PEFT) for name in shapes):
        return parts, tensors, renamed
    modules = (*modules_in(checkpoint.folders),)
    of_model = {name: shape for name, shape in shapes.items() if not name.startswith(modules)}
    known = closest_table(checkpoint.config or {}, of_model)
    if known is None:
        return parts, tensors, renamed
    saved, found = known
    if names := weights.unrecorded:
        count = pluralize(len(names), "quantized weight")
        tensors.append(f"it records no quantization, and loaders take {count} for plain values: {names[0]}")
    if names or (weights.unproved and (found.extra or found.shapes)):  # in an unknown layout
        return parts, tensors, renamed
    own_parts = [name for name in found.extra if weights.quantization is not None and is_part_name(name)]
    if absent := _without_towers(found.missing, checkpoint.config or {}, of_model):
        what = f"{pluralize(len(absent), 'tensor')} from {saved.cls}'s files: {_first(absent)}"
        if _may_hold([of_model[name] for name in found.extra], [saved.required[name] for name in absent]):
            renamed.append(f"missing, or under another name: {what}")
        else:
            tensors.append(_sentence(what))
    if found.shapes:
        tensors.append(f"{saved.cls}'s files have other shapes: {Differences((), (), found.shapes)}")
    for sentences, some in ((tensors, own_parts), (parts, [name for name in found.extra if name not in own_parts])):
        if some:
            sentences.append(f"{saved.cls}'s files don't have {pluralize(len(some), 'tensor')}: {_first(some)}")
    return parts, tensors, renamed


def _without_towers(missing: Sequence[str], config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Sequence[str]:
    """Return missing names, except in a part without any tensor."""
    towers = [_TOWERS[key][1] for key in _absent_towers(config, shapes)]
    return [name for name in missing if not any(one.search(name) for one in towers)]


def _may_hold(others: Sequence[Shape], missing: Sequence[Shape]) -> bool:
    """Return True if tensors with unknown names may be the missing ones, fused, stacked or split."""
    if UNKNOWN_SHAPE in others:
        return True
    absent = {*missing}
    related = {other: {one for one in absent if _may_be_part(other, one)} for other in {*others}}
    elements = sum(prod(other) for other in others if related[other])
    return absent <= set[Shape]().union(*related.values()) and elements >= sum(map(prod, missing))


def _may_be_part(one: Shape, other: Shape) -> bool:
    """Return True if the larger shape has all dims of the smaller one but one, or is flat.

    Of two equally large ones, the shape with more dims is the larger one.
    """
    small, large = sorted((one, other), key=lambda shape: (prod(shape), len(shape)))
    return len(large) == 1 or (Counter(small) - Counter(large)).total() <= 1


def _first(names: Sequence[str]) -> str:
    return names[0] + (", ..." if names[1:] else "")


def table_notes(checkpoint: Checkpoint, others: Collection[tuple[str, str]]) -> list[str]:
    """Return a note if tensors but `others` differ from the table of the config's class."""
    shapes = {name: one for name, one in checkpoint.shapes.items() if (name, WEIGHT) not in others}
    return tables_differ(checkpoint.config, quantized_weights(checkpoint).in_place(shapes))


def has_list(config: Mapping[str, Any] | None) -> bool:
    return closest_table(config or {}, {}) is not None


def table_shapes(config: Mapping[str, Any] | None) -> Mapping[str, Shape]:
    for table in (tables.saved, encoders.saved, composites.saved):
        with suppress(CkptError):
            if config and (saved := table(config)) is not None:
                return saved.required
    return {}


def missing_parts(config: Mapping[str, Any] | None, shapes: Mapping[str, Shape]) -> list[str]:
    """Return a sentence for each part in the config without a tensor.

    Adapters need no parts: their frozen weights are elsewhere.
    """
    if not config or not shapes or any(name.startswith(PEFT) for name in shapes):
        return []
    return list(map(_sentence, [*_predictions(config, shapes), *_towers(config, shapes)]))


def _sentence(what: str) -> str:
    return f"promised by the config but missing: {what}"


def _predictions(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for source in config_parts(config):
        for key in _PREDICTION:
            count, behind = source.get(key), source.get("num_hidden_layers")
            if type(count) is int and count > 0 and not any(_is_predicted(name, behind) for name in names):
                yield f"{pluralize(count, 'multi-token prediction layer')} ({key})"
                return


def _is_predicted(name: str, num_layers: object) -> bool:
    """Return True by name, or for a layer after the last one."""
    layer = _LAYER.search(name)
    is_behind = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return is_behind or _PREDICTED.search(name) is not None


def _towers(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    return (f"{_TOWERS[key][0]} ({key})" for key in _absent_towers(config, names))


def _absent_towers(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for key, (_, pattern) in _TOWERS.items():
        if isinstance(config.get(key), Mapping) and config[key] and not any(map(pattern.search, names)):
            yield key
