"""Adapters that PEFT merges in the loaded model.

FRoD computes a basis from all layers in a category. TinyLoRA and UniLoRA share vectors by layer order. AdaMSS clusters
rows again. Newer PEFT kinds are unknown.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from math import prod
from typing import Any

import numpy as np

from ckpt.adapters.config import ADAMSS, FROD, UNILORA, AdapterConfig
from ckpt.adapters.targets import is_named
from ckpt.base.errors import StorageError, UsageError
from ckpt.base.memory import available_memory
from ckpt.base.text import show_size
from ckpt.commands.merge_lora.effect import Update, raw_bytes
from ckpt.commands.merge_lora.empty_model import EmptyModel
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Shape

#: Kinds whose file can save everything derived from the layer order.
_RECORDED = {FROD: ("save_projection", True), UNILORA: ("save_indices", False)}
#: For PEFT's imports, like scikit-learn.
_LIBRARIES = 128_000_000
#: Per matrix element while PEFT decomposes it, partly in fp64.
_DECOMPOSED = 40
#: Per element in FRoD's largest category, decomposed together.
_TOGETHER = 16
#: Per element in FRoD's largest basis, while PEFT draws positions.
_DRAWN = 64


def needs_order(config: AdapterConfig) -> bool:
    key, default = _RECORDED.get(config.kind, ("", False))
    return config.kind != ADAMSS and not config.raw.get(key, default)


@dataclass(frozen=True, eq=False)
class LoadedModel(EmptyModel):
    """A base model with weights, and an adapter's `factors` loaded by PEFT.

    `merge_all` fills `merged` with the changed parameters, and `unchanged` with the other layers: True if there was
    nothing to add.
    """

    parameters: set[str] = field(default_factory=set)
    merged: dict[str, Any] = field(default_factory=dict)
    unchanged: dict[str, bool] = field(default_factory=dict)

    @property
    def needed_memory(self) -> int:
        sizes = {fqn: prod(one.tensor.shape) * one.dtype.itemsize for fqn, one in self.chosen.items()}
        matrices = {fqn: one.tensor.shape for fqn, one in self.chosen.items() if len(one.tensor.shape) == 2}
        with suppress(re.error, TypeError):  # PEFT refuses this config
            named = {fqn for fqn in matrices if is_named(self.adapter.config.raw, fqn.removesuffix(".weight"))}
            matrices = {fqn: matrices[fqn] for fqn in named} or matrices
        adapter = sum(prod(one.shape) * 4 for one in self.factors.values())
        needed = _LIBRARIES + sum(sizes.values()) + 2 * max(sizes.values(), default=0) + 2 * adapter
        needed += _DECOMPOSED * max(map(prod, matrices.values()), default=0)
        if self.adapter.config.kind != FROD:
            return needed
        categories: dict[str, int] = {}
        for fqn, shape in matrices.items():
            category = fqn.split(".")[-2]
            categories[category] = categories.get(category, 0) + prod(shape)
        kept = sum(sizes[fqn] for fqn in matrices)  # part per layer weight
        widest = max((max(shape) for shape in matrices.values()), default=0)
        return needed + kept + _TOGETHER * max(categories.values(), default=0) + _DRAWN * widest**2

    def check_memory(self) -> None:
        available = available_memory()
        if available is not None and available < self.needed_memory:
            raise StorageError(
                "not enough memory: PEFT merges this adapter type in the loaded model",
                path=self.base.path,
                expected=f"about {show_size(self.needed_memory)}",
                found=f"{show_size(available)} available",
                hint="run it on a machine with more memory; adapters merged layer by layer need less",
            )

    def of_shapes(self, shapes: Mapping[str, Shape]) -> Any:
        """Raise UsageError if the merge depends on layer order."""
        if needs_order(self.adapter.config):
            key, _ = _RECORDED.get(self.adapter.config.kind, ("", False))
            raise UsageError(
                "transformers doesn't know this base, and PEFT merges this adapter type by the model's layer order",
                path=self.base.path,
                expected="a base with a config.json known to transformers",
                found=f"peft_type {self.adapter.config.kind}",
                hint="merge it with PEFT in Python: merge_and_unload, save_pretrained"
                + (f"; or save the adapter with {key}=True" if key else ""),
            )
        return super().of_shapes(shapes)

    def wrap(self, model: Any) -> Any:
        from torch import nn

        loaded: dict[str, Any] = {}  # tied parameters stay one
        self.parameters.update(name for name, _ in model.named_parameters(remove_duplicate=False))
        for name in sorted(self.parameters):
            owner = self.base.ties.get(name, name)
            if owner in self.chosen and self.chosen[owner].dtype in CAST_SOURCES:
                if owner not in loaded:
                    loaded[owner] = nn.Parameter(self.stored(owner).load(), requires_grad=False)
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, loaded[owner])
        wrapped = super().wrap(model)
        if self.adapter.config.kind == FROD:
            _decompose_by_saved_basis(wrapped)
        return wrapped

    def untie(self, fqns: Collection[str]) -> None:
        from torch import nn

        for fqn in fqns:
            module, _, leaf = fqn.rpartition(".")
            layer = self.wrapped.base_model.model.get_submodule(module)
            layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
            setattr(layer, leaf, nn.Parameter(self.stored(fqn).load(), requires_grad=False))

    def merge_all(self, owners: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Merge the adapter. `owners` maps layers to their weights, `known` parameters to their tensors.

        Raise UsageError if PEFT does not merge the kind, or changes more than values.
        """
        import torch

        config, inner = self.adapter.config, self.wrapped.base_model.model
        layers = {module: inner.get_submodule(module) for module in self.layers}
        with torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            try:
                model = self.wrapped.merge_and_unload()
            except (NotImplementedError, ValueError) as error:
                raise UsageError(
                    f"PEFT does not merge this adapter: {error}", path=config.path, found=f"peft_type {config.kind}"
                ) from error
            after = {name: one for name, one in model.named_parameters(remove_duplicate=False) if name in known}
            if others := self.parameters ^ {name for name, _ in model.named_parameters(remove_duplicate=False)}:
                what = "PEFT's merge adds parameters to the model or removes some"
                raise UsageError(what, path=config.path, fqn=min(others))
            for name, parameter in after.items():
                before = self.stored(known[name]).load() if self.is_plain(known[name]) else None
                if before is None:
                    continue
                if (before.shape, before.dtype) != (parameter.shape, parameter.dtype):
                    raise UsageError(
                        "PEFT's merge changes a parameter's shape or dtype",
                        path=config.path,
                        fqn=name,
                        expected=f"{list(before.shape)} {before.dtype}",
                        found=f"{list(parameter.shape)} {parameter.dtype}",
                    )
                if not np.array_equal(raw_bytes(before), raw_bytes(parameter.detach())):
                    self.merged[known[name]] = parameter.detach()
            changed = {fqn.rpartition(".")[0] for fqn in self.merged}
            for module in owners.keys() - changed:
                if owners[module] not in self.merged:
                    self.unchanged[module] = _adds_nothing(layers[module])

    def is_plain(self, owner: str) -> bool:
        return self.chosen[owner].dtype in CAST_SOURCES

    def updates(self, owners: Mapping[str, str]) -> Iterator[tuple[str, Update]]:
        layers = {owner: module for module, owner in owners.items()}
        for owner in dict.fromkeys([*owners.values(), *self.merged]):
            module = owner.rpartition(".")[0]
            target = layers.get(owner, module if module in owners else owner)
            result, is_nothing = self.merged.get(owner), self.unchanged.get(target, False)
            yield owner, _update(self.adapter.path, target, result, is_nothing)

    @property
    def notes(self) -> Iterator[str]:
        config = self.adapter.config
        size = show_size(self.needed_memory)
        yield f"PEFT merged this adapter in the loaded model, which takes about {size} of memory"
        if config.kind == ADAMSS:
            yield (
                f"scikit-learn {version('scikit-learn')} found the rows that factors are for again, as PEFT does: no "
                "file records them. Their numbers are the adapter's. With another release of scikit-learn, or a base "
                "that had another dtype in training, they may be other rows"
            )
        if config.kind == FROD and needs_order(config):
            yield (
                "the basis of FRoD is not in the adapter (save_projection is false): PEFT made it again of the base. "
                "If training computed it on another kind of processor, with another number of threads or in another "
                "dtype, the result is wrong"
            )


def _update(adapter: str, target: str, result: Any, is_nothing: bool) -> Update:
    return Update(adapter, target, lambda weight: weight if result is None else result, lambda: is_nothing)


def _adds_nothing(layer: Any) -> bool:
    """Return True if a merged layer would not change in fp32 either."""
    from torch import nn

    inner = layer.get_base_layer()
    before = {name: parameter.detach().float() for name, parameter in inner.named_parameters(recurse=False)}
    for name, tensor in before.items():
        setattr(inner, name, nn.Parameter(tensor.clone(), requires_grad=False))
    layer.merged_adapters.clear()
    layer.merge()
    return all(bool((getattr(inner, name) == tensor).all()) for name, tensor in before.items())


def _decompose_by_saved_basis(wrapped: Any) -> None:
    """Decompose FRoD's weights by the loaded basis.

    PEFT uses the base's basis. It differs if training ran on another processor.
    """
    from peft.tuners.frod.layer import FrodLayer

    for layer in wrapped.modules():
        if isinstance(layer, FrodLayer):
            weight = layer.get_base_layer().weight
            for name, basis in layer.frod_V.items():
                turned = weight.T if layer.fan_in_fan_out else weight
                part, _ = layer._calculate_frod_u_and_lambda(basis.to(weight.dtype), turned)
                layer.frod_U[name] = part.to(weight.dtype).cpu()
