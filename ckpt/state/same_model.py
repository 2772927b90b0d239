"""Comparison of two configs for model differences that tensor names and shapes do not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.plan.namespace import config_parts

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
#: Config keys without effect on the model's results, or visible in its tensors.
_PASSED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
#: Config keys that are visible in the tensors if only one config has them.
_PASSED_ALONE = {"quantization_config"}


def difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> tuple[str, Any, Any] | None:
    """Return the first entry that shows different models, with both values, or None."""
    kind, depth = ([read(config) for config in (one, other)] for read in (_kind, _depth))
    for name, (a, b) in (("model_type", kind), (_DEPTHS[0], depth)):
        if None not in (a, b) and a != b:
            return name, a, b
    return None


def loaded_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the class and the dtype for loading if two models' configs state others, with both values."""
    for names in (("architectures",), ("dtype", "torch_dtype")):
        a, b = (next((config[name] for name in names if config.get(name)), None) for config in (one, other))
        if None not in (a, b) and str(a).removeprefix("torch.") != str(b).removeprefix("torch."):
            yield names[0], a, b


def stated_otherwise(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None, within: str = "", *, alone: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries with different values in two configs, with both values.

    With `alone`, also yield entries in only one config, with None for the other value.
    """
    alone = alone and None not in (one, other)
    one, other = one or {}, other or {}
    for name in (*one, *(other.keys() - one.keys() if alone else ())):
        a, b = one.get(name), other.get(name)
        if name in _PASSED or name.endswith("token_id") or a == b or (None in (a, b) and not alone):
            continue
        if None in (a, b) and name in _PASSED_ALONE:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from stated_otherwise(a, b, f"{within}{name}.", alone=alone)
        else:
            yield f"{within}{name}", a, b


def _kind(config: Mapping[str, Any] | None) -> Any:
    return (config or {}).get("model_type")


def _depth(config: Mapping[str, Any] | None) -> Any:
    return next((of[name] for of in config_parts(config) for name in _DEPTHS if of.get(name) is not None), None)
