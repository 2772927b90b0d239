"""Models without weights for PEFT.

Every parameter is a single zero expanded to the parameter's shape. Kinds whose layers share tensors by shape (VeRA,
PVeRA, RandLoRA) are merged there.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.base.entries import lazy_module
from ckpt.base.errors import CorruptError, UsageError
from ckpt.commands.merge_lora.effect import Update
from ckpt.commands.merge_lora.find import Adapter, Factor
from ckpt.commands.merge_lora.layer import CONV1D, LINEAR, PEFT_ERRORS, empty_layer, model_of, with_adapter
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Shape

if TYPE_CHECKING:
    import torch

    class BuilderProtocol(Protocol):
        def build_model(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> torch.nn.Module | None: ...


MODEL_BUILDER: BuilderProtocol = lazy_module("converters.names.transformers.relation")
_LOCK = threading.Lock()  # one model takes weights in turn


def empty_model(
    base: Checkpoint,
    chosen: Mapping[str, Choice] | None = None,
    of_shapes: Callable[[Mapping[str, Shape]], Any] | None = None,
) -> Any:
    """Return the model of `base` without weights, or raise UsageError.

    If transformers does not know the model, call `of_shapes`.
    """
    import torch
    from torch import nn

    chosen = chosen or choices(base, None)
    shapes = {fqn: choice.tensor.shape for fqn, choice in chosen.items()}
    model = MODEL_BUILDER.build_model(base.config, shapes) if base.config else None
    if model is None and of_shapes is not None:
        model = of_shapes(shapes)
    if model is None:
        raise UsageError("transformers doesn't know the base model", path=base.path)
    dtypes = {fqn: getattr(torch, choice.dtype.name) for fqn, choice in chosen.items()}
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}  # keyed by the original parameter: tied ones stay tied
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = dtypes.get(f"{path}.{name}".lstrip("."), parameter.dtype)
            zero = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, stand_ins.setdefault(parameter, nn.Parameter(zero, requires_grad=False)))
    return model


@dataclass(frozen=True, eq=False)
class EmptyModel:
    """A base model without weights, and an adapter's `factors` loaded by PEFT.

    `adapted` names the layers with adapter tensors. `stored` returns a parameter before any update.
    """

    adapter: Adapter
    base: Checkpoint
    chosen: Mapping[str, Choice]
    factors: Mapping[str, Factor]
    adapted: frozenset[str]
    stored: Callable[[str], Factor]

    @cached_property
    def peft_config(self) -> Any:
        from peft import PeftConfig

        raw = self.adapter.config.raw
        settings = {**raw, "modules_to_save": None, "bias": "none", "task_type": None}
        settings = {key: value for key, value in settings.items() if key != "bias" or "bias" in raw}
        made = PeftConfig.from_peft_type(**settings)
        if self.adapter.config.saved:  # PEFT excludes saved modules itself, even for kinds without this entry
            made.exclude_modules = _excluded(self.adapter.config.saved, getattr(made, "exclude_modules", None))
        return made

    @cached_property
    def wrapped(self) -> Any:
        """PEFT's model. Raise CorruptError if PEFT does not load the adapter."""
        import torch

        path = self.adapter.config.path
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            try:
                return self.wrap(empty_model(self.base, self.chosen, self.of_shapes))
            except ImportError as error:
                raise UsageError(f"PEFT needs another package: {error}", path=path) from error
            except PEFT_ERRORS as error:
                raise CorruptError(f"PEFT does not load this adapter: {error}", path=path) from error

    def wrap(self, model: Any) -> Any:
        state = {fqn: one.load() for fqn, one in self.factors.items()}
        return with_adapter(model, self.peft_config, state, self.adapter.config.path)

    def of_shapes(self, shapes: Mapping[str, Shape]) -> Any:
        """Return a model with the matrices in `shapes`.

        transformers' Conv1D always has a bias. If the bias size does not show the class, the adapter's config does.
        PEFT corrects its entry at each layer, so the other layers must have one class.
        """
        shapes = {**{alias: shapes[owner] for alias, owner in self.base.ties.items()}, **shapes}
        matrices = {fqn.removesuffix(".weight"): shape for fqn, shape in shapes.items() if fqn.endswith(".weight")}
        matrices = {module: shape for module, shape in matrices.items() if len(shape) == 2}
        biases = {module: shapes[f"{module}.bias"][0] for module in matrices if f"{module}.bias" in shapes}
        classes = {one: CONV1D if biases.get(one, shape[0]) != shape[0] else LINEAR for one, shape in matrices.items()}
        square = {module for module in biases if len({*matrices[module]}) == 1}
        others = {classes[module] for module in biases.keys() - square}
        recorded = CONV1D if self.adapter.config.raw.get("fan_in_fan_out") else LINEAR
        for module in square & self.adapted:
            if others - {recorded}:
                raise UsageError(
                    "unknown class for a square layer: other layers contradict the adapter's config",
                    path=self.adapter.path,
                    fqn=module,
                    expected=recorded,
                    found=" and ".join(sorted(others)),
                )
            classes[module] = recorded
        made = {one: empty_layer(classes[one], matrices[one], has_bias=one in biases) for one in sorted(matrices)}
        return model_of(made)

    @property
    def layers(self) -> tuple[str, ...]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules = self.wrapped.base_model.model.named_modules()
        return tuple(name for name, module in modules if isinstance(module, BaseTunerLayer))

    def merge(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        from torch import nn

        with _LOCK:
            layer = self.wrapped.base_model.model.get_submodule(module)
            inner = layer.get_base_layer()
            stand_in, inner.weight = inner.weight, nn.Parameter(weight, requires_grad=False)
            layer.merge()
            merged: torch.Tensor = inner.weight.detach()
            inner.weight = stand_in
            layer.merged_adapters.clear()
        return merged

    def update(self, module: str) -> Update:
        def is_nothing() -> bool:
            fqn = f"{module}.weight"
            weight = self.stored(fqn).load().float()
            return bool((self.merge(module, weight.clone()) == weight).all())

        return Update(self.adapter.path, module, lambda weight: self.merge(module, weight), is_nothing)


def _excluded(saved: Sequence[str], others: str | Iterable[str] | None) -> str:
    wholly = [rf"(.*\.)?{one}(\..*)?" for one in saved]  # regular expressions in PEFT
    if isinstance(others, str):
        return "|".join(f"(?:{one})" for one in (*wholly, others))
    return "|".join([*wholly, *(rf"(.*\.)?{re.escape(one)}" for one in others or ())])
