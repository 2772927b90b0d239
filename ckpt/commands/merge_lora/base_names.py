"""Adapters with module names from before transformers 5, or from their trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from ckpt.adapters import names
from ckpt.adapters.names import PREFIX, parse_name
from ckpt.base.errors import CkptError
from ckpt.commands.merge_lora.find import Adapter
from ckpt.plan.checkpoint import HUB, TRANSFORMERS, WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Extent, Shape, Tensor, Whole
from ckpt.state.naming import to_namespace

_NAME = "name:"
_NUMBER = re.compile(r"\d+")


def in_memory(adapter: Adapter, base: Checkpoint) -> Adapter:
    """Return the adapter with `base`'s names, if they are known. `base` uses transformers' names."""
    known = base.shapes.keys() | base.ties.keys()
    modules = {fqn: list(_modules(fqn)) for fqn in adapter.factors}
    unknown = {fqn: found for fqn, found in modules.items() if not any(f"{one}.weight" in known for one in found)}
    unknown = {fqn: found for fqn, found in unknown.items() if parse_name(fqn).module not in known}
    if not unknown or not (base.config or {}).get("model_type"):
        return adapter
    weights = {f"{module}.weight" for found in unknown.values() for module in found}
    new = {old: name for old, name in _names_in_memory(base, weights).items() if name in known}
    new |= {old: name for old in weights - new.keys() for name in _trainer_names(old, adapter, base) if name in known}
    moved: dict[str, str] = {}
    for fqn, found in unknown.items():
        module = next((one for one in found if f"{one}.weight" in new), None)
        if module is not None:
            moved[fqn] = module
    if not moved:
        return adapter
    former = {new[f"{module}.weight"].removesuffix(".weight"): module for module in moved.values()}
    by_module = {module: name for name, module in former.items()}
    factors = {}
    for fqn, factor in adapter.factors.items():
        name = fqn if fqn not in moved else _with_module(fqn, moved[fqn], by_module[moved[fqn]])
        factors[name] = replace(factor, fqn=name)
    old, name = next(iter(by_module.items()))
    note = f"the adapter uses names from another transformers release or trainer, for example {old} for {name}"
    config = replace(adapter.config, former={**adapter.config.former, **former})
    return replace(adapter, config=config, factors=factors, notes=(*adapter.notes, note))


def _trainer_names(weight: str, adapter: Adapter, base: Checkpoint) -> Iterator[str]:
    """Yield transformers' names for Tinker's names, and for Unsloth's gpt-oss in bitsandbytes.

    Only Tinker's adapters record `all-linear`: PEFT lists the layers instead.
    """
    is_of_tinker = adapter.config.raw.get("target_modules") == "all-linear"
    if weight == "model.unembed_tokens.weight":
        yield "lm_head.weight"
    if (base.config or {}).get("model_type") == "gpt_oss":
        weight = weight.replace(".router.linear.", ".router.")
        yield weight.replace(".attn.", ".self_attn.") if is_of_tinker else weight
    elif is_of_tinker:
        yield re.sub(r"^model\.", "model.language_model.", weight)


def _modules(fqn: str) -> Iterator[str]:
    name = parse_name(fqn)
    module = name.module
    if name.kind != names.BASE:
        yield module
        return
    while module := module.rpartition(".")[0]:
        yield module


def _with_module(fqn: str, old: str, new: str) -> str:
    prefix = PREFIX if fqn.startswith(PREFIX) else ""
    return f"{prefix}{new}{fqn.removeprefix(prefix).removeprefix(old)}"


def _names_in_memory(base: Checkpoint, weights: Iterable[str]) -> dict[str, str]:
    """Return the names in memory after the model of `base` loads `weights`.

    A name may mix file and memory names: transformers 4.52 had `model.vision_tower.vision_model` in memory. The second
    pass uses the real shapes, because a conversion that permutes rows is no renaming.
    """
    shapes = base.shapes
    found: dict[str, str] = {}
    for namespace in (HUB, TRANSFORMERS):
        rest = dict.fromkeys((name for name in weights if name not in found), (1, 1))
        first = _loaded(base, rest, namespace)
        real = {old: shapes[new] for old, new in first.items() if new in shapes}
        found |= _loaded(base, real, namespace)
    return found


def _loaded(base: Checkpoint, weights: Mapping[str, Shape], namespace: str) -> dict[str, str]:
    try:
        return _translated(base, weights, namespace)
    except CkptError:  # a name may mean a part of a tensor: try names together if they differ only in numbers
        groups: dict[str, dict[str, Shape]] = {}
        for name, shape in weights.items():
            groups.setdefault(_NUMBER.sub("#", name), {})[name] = shape
        found: dict[str, str] = {}
        for group in groups.values():
            with suppress(CkptError):
                found |= _translated(base, group, namespace)
        return found


def _translated(base: Checkpoint, weights: Mapping[str, Shape], namespace: str) -> dict[str, str]:
    tensors = {}
    for name, shape in sorted(weights.items()):
        extent = Extent.contiguous(f"{_NAME}{name}", 0, FLOAT32, shape)
        tensors[name, WEIGHT] = Tensor(name, WEIGHT, FLOAT32, shape, Whole(extent))
    stand_in = Checkpoint(path=base.path, format="", tensors=tensors, files=(), namespace=namespace, config=base.config)
    found = {}
    for (fqn, _), tensor in to_namespace(to_namespace(stand_in, HUB), TRANSFORMERS).tensors.items():
        extents = [fragment.extent for fragment in tensor.fragments()]
        old = extents[0].path.removeprefix(_NAME) if extents else ""
        if len(extents) == 1 and extents[0] == Extent.contiguous(f"{_NAME}{old}", 0, FLOAT32, weights[old]):
            found[old] = fqn
    return found
