"""Classes of a model's modules, for layers whose shapes don't show how a LoRA adapter is oriented.

The installed transformers (written against 5.23) builds the model without data. Its source text is searched first,
because an import costs seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.families.tables import FAMILIES
from converters.names.transformers.relation import build_model
from converters.names.transformers.transformers_source import mentions, model_types

#: Layers with a weight, in torch and transformers.
LAYERS = ("Linear", "Embedding", "Conv1D", "Conv1d", "Conv2d", "Conv3d")


@dataclass(frozen=True, slots=True)
class Module:
    """Module's class, as its nearest base in `LAYERS`.

    `is_transposed`: its stacked experts are [experts, in, out]. `is_interleaved`: their gate and up rows alternate.
    `parameters` are in registration order.
    """

    layer: str | None
    is_transposed: bool
    is_interleaved: bool
    parameters: tuple[str, ...]

    @property
    def is_conv1d(self) -> bool:
        """True for transformers' Conv1D, with weights [in, out]."""
        return self.layer == "Conv1D"


def has_conv1d(config: Mapping[str, Any] | None) -> bool | None:
    """Return True if the model may have Conv1D layers. None if its class is unknown."""
    found = [_may_have_conv1d(model_type) for model_type in model_types(config or {})]
    return None if not found or found[0] is None else any(found)


def _may_have_conv1d(model_type: str) -> bool | None:
    family = FAMILIES.get(model_type)
    if family is not None and not family.own_code and not family.conv1d:
        return False
    return mentions(model_type, "Conv1D")


def describe(
    config: Mapping[str, Any] | None, shapes: Mapping[str, Shape], names: Iterable[str] | None
) -> dict[str, Module] | None:
    """Return None if the model's class is unknown."""
    if config is None or mentions(str(config.get("model_type")), "Conv1D") is None:
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
