"""Parts in a model's config that are missing from its checkpoint.

For most models transformers drops the multi-token prediction layers on saving, and an engine never saves a frozen part
that it does not hold. Writers don't notice, but servers fail.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, WEIGHT, Checkpoint
from ckpt.plan.model_config import config_parts
from ckpt.plan.tensors import Shape
from ckpt.runs.sentence_modules import modules_in
from ckpt.state.naming import as_hub
from converters.names.families import composites, encoders, tables
from converters.names.hub.proof import PEFT, extra, misshapen, missing, tables_differ
from converters.quantized.parts import is_part_name, quantized_weights

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


def missing_content(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return `missing_parts`, and sentences on single missing tensors.

    In-memory names are converted by a table, without a slow import of transformers.
    """
    is_in_memory = checkpoint.namespace in (OWN, TRANSFORMERS) and not checkpoint.is_adapter
    if is_in_memory and checkpoint.config and missing(checkpoint.config, {})[1]:
        with suppress(CkptError):
            checkpoint = as_hub(checkpoint)
    weights = quantized_weights(checkpoint)
    shapes = weights.in_place(checkpoint.shapes)
    modules = (*modules_in(checkpoint.folders),)
    of_model = {name: shape for name, shape in shapes.items() if not name.startswith(modules)}
    tensors = _missing_tensors(checkpoint.config, of_model) if checkpoint.namespace == HUB else []
    if checkpoint.namespace == HUB and (names := weights.unrecorded) and missing(checkpoint.config or {}, {})[1]:
        count = pluralize(len(names), "quantized weight")
        tensors.append(f"it records no quantization, and loaders take {count} for plain values: {names[0]}")
    parts = missing_parts(checkpoint.config, shapes)
    is_proved = checkpoint.namespace == HUB and not checkpoint.is_adapter and not weights.unproved
    if is_proved and not any(name.startswith(PEFT) for name in shapes):
        unknown, cls = extra(checkpoint.config or {}, of_model)
        if wrong := misshapen(checkpoint.config or {}, of_model):
            tensors.append(wrong)
        for found, of in ((tensors, True), (parts, False)):
            if some := [name for name in unknown if (weights.quantization is not None and is_part_name(name)) == of]:
                more = ", ..." if some[1:] else ""
                found.append(f"{cls}'s files don't have {pluralize(len(some), 'tensor')}: {some[0]}{more}")
    return parts, tensors


def table_notes(checkpoint: Checkpoint, others: Collection[tuple[str, str]]) -> list[str]:
    """Return a note if tensors but `others` differ from the table of the config's class."""
    shapes = {name: one for name, one in checkpoint.shapes.items() if (name, WEIGHT) not in others}
    return tables_differ(checkpoint.config, quantized_weights(checkpoint).in_place(shapes))


def has_list(config: Mapping[str, Any] | None) -> bool:
    return bool(config and missing(config, {})[1])


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


def _missing_tensors(config: Mapping[str, Any] | None, shapes: Mapping[str, Shape]) -> list[str]:
    """Describe missing tensors, except whole parts."""
    if not config or any(name.startswith(PEFT) for name in shapes):
        return []
    names, cls = missing(config, shapes)
    absent = [
        pattern for key, (_, pattern) in _TOWERS.items() if any(f"({key})" in one for one in _towers(config, shapes))
    ]
    if names := [name for name in names if not any(pattern.search(name) for pattern in absent)]:
        more = ", ..." if names[1:] else ""
        return [_sentence(f"{pluralize(len(names), 'tensor')} from {cls}'s files: {names[0]}{more}")]
    return []


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
    for key, (what, pattern) in _TOWERS.items():
        if isinstance(config.get(key), Mapping) and config[key] and not any(map(pattern.search, names)):
            yield f"{what} ({key})"
