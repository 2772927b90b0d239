"""Relation between a transformers model's in-memory names and the names in the Hub's files.

transformers 5 stacks experts and renames modules on loading, and reverts this in `save_pretrained`. Training
checkpoints hold the in-memory form. `tables` has both directions for known architectures. For others, the installed
transformers' own tables and code (`conversion_mapping.py`, `core_model_loading.py`; written against 5.23) run on
tensors without data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import CkptError, CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import HUB, TRANSFORMERS, Checkpoint, Layout
from ckpt.plan.namespace import Namespace
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Shape
from converters.names.families.config import architectures
from converters.names.transformers.order import as_registered
from converters.names.transformers.rules import Direction, config_mismatch
from converters.names.transformers.save_conversions import stored_names
from converters.names.transformers.tables import declared
from converters.names.transformers.transformers_source import (
    base_prefixes,
    class_names,
    converted_identifiers,
    is_base_model,
    model_types,
    package,
)

if TYPE_CHECKING:
    from converters.names.transformers.tracing import Traced

#: Prefix for PEFT-wrapped models, missing from transformers' tables.
_PEFT_PREFIX = "base_model.model."
#: Stacked experts. Only these models' Hub files have them.
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj)$")
_STACKED_ON_THE_HUB = frozenset({"gpt_oss", "llama4", "llama4_text"})
#: Names in old files only (the table `legacy` in `conversion_mapping.py`).
_LEGACY = re.compile(r"LayerNorm\.(gamma|beta)|\.weight_[gv]$|language_model\.model\.")
#: Larger models would take minutes and gigabytes to lay out.
_MAX_COUNTS = {"layers": 4096, "experts": 100_000}


def relation(
    config: Mapping[str, Any] | None, shapes: Mapping[str, Shape], direction: Direction = "to_hub"
) -> Relation | None:
    """Return links to the other side, or None if both sides are equal.

    `to_hub` converts to the output of `save_pretrained`, `to_memory` to the result of `from_pretrained`. A name outside
    the model's class stays unchanged: it already has the other form (a transformers 4 run), or is the user's own.

    Raise LossError if transformers rearranges a tensor in a way that boxes can't describe.
    """
    if config is None or next(model_types(config), None) is None:
        return None
    if any(name.startswith(_PEFT_PREFIX) for name in shapes):
        return None
    rules = declared(config)
    if rules is not None:
        check_counts(config)
        found = rules.relation(shapes, direction)
        if direction == "to_hub" or package() is None or _loads_as_it_is(config, found.b_shapes if found else shapes):
            return found
    tables = converted_identifiers()
    if tables is None:
        _refuse_stacked(config, shapes)
        return None
    if tables.isdisjoint(_identifiers(config)) and (direction == "to_hub" or _loads_as_it_is(config, shapes)):
        return None
    results = _convert(config, shapes, direction)
    return _as_relation(results, shapes) if results else None


def _identifiers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield model types and class names."""
    yield from architectures(config)
    for model_type in model_types(config):
        yield model_type
        yield from class_names(model_type)


def _loads_as_it_is(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    """Return True if `from_pretrained` renames nothing.

    Without own conversions, it renames names from old releases, and adds or removes the base model's prefix.
    """
    if any(_LEGACY.search(name) for name in shapes):
        return False
    prefixes = base_prefixes(config)
    if not prefixes or not architectures(config):
        return True
    prefixed = any(name.startswith(prefix + ".") for name in shapes for prefix in prefixes)
    return prefixed != is_base_model(config)


def _refuse_stacked(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    if not _STACKED_ON_THE_HUB.isdisjoint(model_types(config)):
        return
    for name, shape in shapes.items():
        if _STACKED.search(name) and len(shape) == 3:
            raise UsageError(
                "this model's experts are stacked in transformers 5's memory layout; transformers is needed to "
                "name them for the Hub",
                fqn=name,
                hint="pip install 'transformers>=5' torch",
            )


def _convert(config: Mapping[str, Any], shapes: Mapping[str, Shape], direction: Direction) -> dict[str, Traced] | None:
    """Return the converted tensors, by new name."""
    from converters.names.transformers.tracing import Traced

    # Hub names don't show the class.
    model = build_model(config, shapes if direction == "to_hub" else {})
    if model is None:
        return None
    memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    traced = {name: Traced.source(name, shape) for name, shape in shapes.items()}
    try:
        if direction == "to_hub":
            inside = {name: tensor for name, tensor in traced.items() if name in memory}
            results = _revert(model, inside)
            others = traced.keys() - inside.keys()
        else:
            results, others = _load(model, traced, memory)
    except CkptError:
        raise
    except Exception as error:
        raise _not_converted(error) from error
    for name in sorted(others):
        if name in results:
            raise LossError("two tensors would get the same name", fqn=name)
        results[name] = traced[name]
    return results


def build_model(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Any:
    """Build the class with the most tensor names in common, or else the config's first, without data."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    check_counts(config)
    try:
        made = CONFIG_MAPPING[model_type].from_dict(floats({**config, "quantization_config": None}))
    except Exception as error:
        raise CorruptError(f"transformers does not accept the model's config: {error}") from error
    classes = [getattr(transformers, name, None) for name in architectures(config)]
    classes += [mapping.get(type(made), None) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)]
    best, best_count = None, 0
    for cls in dict.fromkeys(classes):
        if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
            continue
        try:
            with torch.device("meta"):
                model = cls(made)
        except ImportError as error:
            needed = " ".join(str(error).split())
            raise UsageError(f"transformers cannot build {cls.__name__} here: {needed}") from error
        except Exception as error:
            raise CorruptError(f"transformers cannot build {cls.__name__} from this config: {error}") from error
        names = model.state_dict().keys()
        count = len(names & shapes.keys())
        if best is None or count > best_count:
            best, best_count = model, count
        if count == len(shapes) or not shapes:
            break
    return best


def floats(value: Any) -> Any:
    """Restore floats missing from JSON, written by transformers 5 as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        tag = value.get("__float__") if len(value) == 1 else None
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: floats(inner) for key, inner in value.items()}
    return [floats(inner) for inner in value] if isinstance(value, list) else value


def check_counts(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        for what, most in _MAX_COUNTS.items():
            if isinstance(value, int) and what in key and value > most:
                raise CorruptError(
                    f"the config has too many {what}", expected=f"at most {most}", found=f"{key} {value}"
                )


def _revert(model: Any, traced: Mapping[str, Traced]) -> dict[str, Traced]:
    """Follow `save_pretrained` with `save_original_format=True`, its default."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(stored_names(model), dict(traced)))
    except CkptError:
        raise
    except Exception as error:
        if len(traced) == 1:
            raise _not_converted(error, *traced.values()) from error
        for name, tensor in traced.items():  # to find the failing one
            _revert(model, {name: tensor})
        raise


def _not_converted(error: Exception, tensor: Traced | None = None) -> LossError:
    return LossError(
        f"transformers cannot convert this model's tensors: {type(error).__name__}: {error}",
        fqn=None if tensor is None else tensor.pieces[0].source,
        found=None if tensor is None else f"shape {list(tensor.shape)}",
        hint="does the config belong to this checkpoint?",
    )


def _load(model: Any, traced: Mapping[str, Traced], memory: Mapping[str, Shape]) -> tuple[dict[str, Traced], set[str]]:
    """Follow `convert_and_load_state_dict_in_model`. Return the unused names, too."""
    from copy import deepcopy

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    collected: dict[str, Any] = {}
    firsts: dict[str, Traced] = {}
    others: set[str] = set()
    for name in sorted(traced, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, memory)
        if new not in memory and name in memory:
            new, pattern = rename_source_key(name, [], [], prefix, memory)
        if new not in memory:
            others.add(name)
            continue
        if new not in collected:
            collected[new] = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(name, new)
            firsts[new] = traced[name]
        collected[new].add_tensor(new, name, pattern or name, traced[name])
    results: dict[str, Traced] = {}
    for first, transform in collected.items():
        try:
            converted = transform.convert(first, model=model, config=model.config)
        except CkptError:
            raise
        except Exception as error:
            raise _not_converted(error, firsts[first]) from error
        for name, value in converted.items():
            tensor = value[0] if isinstance(value, list) else value
            if name in results:
                raise LossError("two tensors would get the same name", fqn=name)
            due = memory.get(name) if isinstance(transform, WeightConverter) else None
            if due is not None and due != tuple(tensor.shape):
                raise config_mismatch(name, list(due), list(tensor.shape))
            results[name] = tensor
    return results, others


def _as_relation(results: Mapping[str, Traced], shapes: Mapping[str, Shape]) -> Relation | None:
    links: list[Link] = []
    for name, tensor in results.items():
        if not tensor.pieces and tensor.numel():
            raise LossError("the name conversion creates this tensor from nothing", fqn=name)
        links += tensor.links(name)
    new_shapes = {name: tuple(tensor.shape) for name, tensor in results.items()}
    if all(link == Link.rename(link.a, link.a, shapes[link.a]) for link in links) and new_shapes == dict(shapes):
        return None
    return Relation(tuple(links), dict(shapes), new_shapes).check()


def _renamed(checkpoint: Checkpoint, namespace: str, direction: Direction) -> Checkpoint:
    assert checkpoint.config is not None
    found = relation(checkpoint.config, checkpoint.shapes, direction)
    return replace(checkpoint, namespace=namespace) if found is None else translate(checkpoint, found, namespace)


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    return _renamed(checkpoint, HUB, "to_hub")


def from_hub(checkpoint: Checkpoint, layout: Layout | None = None) -> Checkpoint:
    """Use transformers' module names, and their order in param groups."""
    named = _renamed(checkpoint, TRANSFORMERS, "to_memory")
    model_type, state = str((named.config or {}).get("model_type")), named.state
    groups = tuple(replace(group, fqns=tuple(as_registered(group.fqns, model_type))) for group in state.param_groups)
    return replace(named, state=replace(state, param_groups=groups))


NAMESPACE = Namespace(to_hub, from_hub)
