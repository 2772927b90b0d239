"""The classes of a model's modules, for layers whose shapes do not tell the orientation of a LoRA adapter.

Taken from the installed transformers (written against 5.23), whose model is built without data.  Its source text tells
first whether there is anything to ask: an import costs seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.transformers.installed import mentions, model_types
from converters.names.transformers.relation import build_model

#: Classes of layers with a weight, torch's and transformers'.
LAYERS = ("Linear", "Embedding", "Conv1D", "Conv1d", "Conv2d", "Conv3d")


@dataclass(frozen=True, slots=True)
class Module:
    """A module's class, by the nearest of `LAYERS` that it derives from, and what else shapes do not tell.

    `is_transposed`: its stacked experts are [experts, in, out].  `is_interleaved`: their gate and up take turns.
    `parameters` are its own, in the order in which it registers them.
    """

    layer: str | None
    is_transposed: bool
    is_interleaved: bool
    parameters: tuple[str, ...]

    @property
    def is_conv1d(self) -> bool:
        """Whether it is transformers' Conv1D, whose weight is [in, out]."""
        return self.layer == "Conv1D"


def has_conv1d(config: Mapping[str, Any] | None) -> bool | None:
    """Whether the model's source uses transformers' Conv1D at all; None where there is no source of it."""
    found = [mentions(model_type, "Conv1D") for model_type in model_types(config or {})]
    return None if not found or found[0] is None else any(found)


def describe(
    config: Mapping[str, Any] | None, shapes: Mapping[str, Shape], names: Iterable[str] | None
) -> dict[str, Module] | None:
    """The modules called `names`, or all, of the model that has tensors of these names.

    None where its class is not known.
    """
    if config is None or has_conv1d(config) is None:
        return None
    model = build_model(config, shapes)
    if model is None:
        return None
    modules = dict(model.named_modules())
    return {
        name: Module(
            next((one.__name__ for one in type(module).__mro__ if one.__name__ in LAYERS), None),
            bool(getattr(module, "is_transposed", False)),
            not getattr(module, "is_concatenated", True),
            tuple(parameter for parameter, _ in module.named_parameters(recurse=False)),
        )
        for name in (modules if names is None else names)
        if (module := modules.get(name)) is not None
    }
