"""What a model's config promises and its checkpoint lacks: multi-token prediction, a tower, tensors of its layers.

transformers drops layers of multi-token prediction of most models when it saves, and an engine that never had a frozen
part in its hands saves nothing of it; neither is an error of the one who writes, and both are found out by whoever
serves the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt.base.errors import CkptError
from ckpt.base.text import counted
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, Checkpoint
from ckpt.plan.tensors import Shape
from ckpt.state.naming import as_hub
from converters.names.hub.proof import PEFT, missing
from converters.names.quantization.parts import quantized_weights

#: How configs call the number of layers of multi-token prediction: DeepSeek, GLM and MiMo; Qwen; Megatron; MiniMax;
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
#: Parts of models by the config of each, and what is in the names of their tensors.
_TOWERS = {
    "vision_config": ("a vision tower", re.compile(r"vis(ion|ual)|image|img")),
    "audio_config": ("an audio tower", re.compile(r"audio|speech")),
}


def lacking_of(checkpoint: Checkpoint) -> list[str]:
    """What `lacking` says of a checkpoint.

    The names that a model has in memory are turned into those of the Hub's files where a table has these: transformers
    is not asked, which takes seconds to import.
    """
    is_in_memory = checkpoint.namespace in (OWN, TRANSFORMERS) and not checkpoint.is_adapter
    if is_in_memory and checkpoint.config and missing(checkpoint.config, {})[1]:
        with suppress(CkptError):  # then its own names tell less
            checkpoint = as_hub(checkpoint)
    shapes = quantized_weights(checkpoint).in_place(checkpoint.shapes)
    return lacking(checkpoint.config, shapes, is_hub=checkpoint.namespace == HUB)


def lacking(config: Mapping[str, Any] | None, shapes: Mapping[str, Shape], *, is_hub: bool = False) -> list[str]:
    """A sentence for each thing that a config promises and that is not among tensors of `shapes`, by name.

    Of an adapter, and of a model with adapters, there is none: what is frozen stands elsewhere.
    Where these are names of the Hub's files (`is_hub`), they are compared with a table of the architecture too.
    """
    if not config or not shapes or any(name.startswith(PEFT) for name in shapes):
        return []
    found = [*_predictions(config, shapes), *_towers(config, shapes)]
    names, cls = missing(config, shapes) if is_hub else ([], "")
    said = [pattern for key, (_, pattern) in _TOWERS.items() if any(f"({key})" in one for one in found)]
    if names := [name for name in names if not any(pattern.search(name) for pattern in said)]:
        found.append(
            f"{counted(len(names), 'tensor')} that files of {cls} have: {names[0]}" + (", ..." if names[1:] else "")
        )
    return [f"the config promises {what}, and there is nothing of it" for what in found]


def _predictions(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _PREDICTION:
            count, behind = source.get(key), source.get("num_hidden_layers")
            if type(count) is int and count > 0 and not any(_is_predicted(name, behind) for name in names):
                yield f"{counted(count, 'layer')} of multi-token prediction ({key})"
                return


def _is_predicted(name: str, num_layers: object) -> bool:
    """Whether a tensor is of multi-token prediction: by its name, or as a layer behind the last one."""
    layer = _LAYER.search(name)
    is_behind = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return is_behind or _PREDICTED.search(name) is not None


def _towers(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for key, (what, pattern) in _TOWERS.items():
        if isinstance(config.get(key), Mapping) and config[key] and not any(map(pattern.search, names)):
            yield f"{what} ({key})"
