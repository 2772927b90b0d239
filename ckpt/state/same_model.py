"""Whether two configs tell of the same model, where the names and the shapes of tensors do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: How configs call the number of layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
#: Entries of a config that do not change what a model computes of given tensors, or that its tensors show as well.
_PASSED = {
    *("_name_or_path", "architectures", "dtype", "quantization_config", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache"),
}


def difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> tuple[str, Any, Any] | None:
    """The entry in which two configs tell of different models, with both values; None where there is none."""
    kind, depth = ([read(config) for config in (one, other)] for read in (_kind, _depth))
    for name, (a, b) in (("model_type", kind), (_DEPTHS[0], depth)):
        if None not in (a, b) and a != b:
            return name, a, b
    return None


def stated_otherwise(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None, within: str = "", *, alone: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries that two configs state differently, with both values.

    With `alone`, also entries that only one of two given configs states: the other value is None.
    """
    alone = alone and None not in (one, other)
    one, other = one or {}, other or {}
    for name in (*one, *(other.keys() - one.keys() if alone else ())):
        a, b = one.get(name), other.get(name)
        if name in _PASSED or name.endswith("token_id") or a == b or (None in (a, b) and not alone):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from stated_otherwise(a, b, f"{within}{name}.", alone=alone)
        else:
            yield f"{within}{name}", a, b


def _kind(config: Mapping[str, Any] | None) -> Any:
    return (config or {}).get("model_type")


def _depth(config: Mapping[str, Any] | None) -> Any:
    """The number of layers, of a model with images those of its text model."""
    config = config or {}
    inner = config.get("text_config")
    sources = (config, inner if isinstance(inner, Mapping) else {})
    return next((of[name] for of in sources for name in _DEPTHS if of.get(name) is not None), None)
