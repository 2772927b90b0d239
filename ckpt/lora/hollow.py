"""Models of PEFT's that have no weights, for what it does to an adapter in the whole model.

Every parameter is one zero, seen in the parameter's shape: it takes no memory.  Adapters are combined and converted in
such a model, as that reads their factors only.  Kinds whose layers share tensors (VeRA, PVeRA, RandLoRA, TinyLoRA,
UniLora) are merged in it, where one layer at a time gets its weight: what they share goes by the shapes and the order
of all.

A model that transformers does not know has its matrices alone.  What VeRA, PVeRA and RandLoRA share goes by the largest
shapes of their layers, and the adapter's file has tensors of each; for the others `ckpt.lora.order` finds the order.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.lora.effect import Update
from ckpt.lora.find import Adapter, Factor
from ckpt.lora.layer import CONV1D, LINEAR, made_layer, model_of, with_adapter
from ckpt.lora.order import TINYLORA, ordered
from ckpt.plan import registry
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Shape

if TYPE_CHECKING:
    import torch

_LOCK = threading.Lock()  # weights are put into one model in turn


def hollow(
    base: Checkpoint,
    chosen: Mapping[str, Choice] | None = None,
    of_shapes: Callable[[Mapping[str, Shape]], Any] | None = None,
) -> Any:
    """The model of `base` with its shapes and dtypes, or those of `chosen`, and no weights.

    Where transformers does not know it, `of_shapes` makes one, or else UsageError is raised.
    """
    import torch
    from torch import nn

    chosen = chosen or choices(base, None)
    shapes = {fqn: choice.tensor.shape for fqn, choice in chosen.items()}
    model = registry.service("build_model")(base.config, shapes) if base.config else None
    if model is None and of_shapes is not None:
        model = of_shapes(shapes)
    if model is None:
        raise UsageError("this takes a model that transformers knows, and the base is none", path=base.path)
    dtypes = {fqn: getattr(torch, choice.dtype.name) for fqn, choice in chosen.items()}
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter that it stands for: tied ones stay one
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = dtypes.get(f"{path}.{name}".lstrip("."), parameter.dtype)
            zero = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, stand_ins.setdefault(parameter, nn.Parameter(zero, requires_grad=False)))
    return model


@dataclass(frozen=True, eq=False)
class WholeModel:
    """The hollow model of a base, with the `factors` of an adapter in it as PEFT loads them.

    `adapted` are the layers that it has tensors for; `stored` is a parameter before any update, the base's or one that
    another adapter brings in its place.
    """

    adapter: Adapter
    base: Checkpoint
    chosen: Mapping[str, Choice]
    factors: Mapping[str, Factor]
    adapted: frozenset[str]
    stored: Callable[[str], Factor]
    #: What was found while the model was made, and the user has to know.
    told: list[str] = field(default_factory=list)

    @cached_property
    def made(self) -> Any:
        """PEFT's config of the adapter, for its layers alone: those that are saved as a whole are none of them."""
        from peft import PeftConfig

        raw = self.adapter.config.raw
        settings = {**raw, "modules_to_save": None, "bias": "none", "task_type": None}
        settings = {key: value for key, value in settings.items() if key != "bias" or "bias" in raw}
        made = PeftConfig.from_peft_type(**settings)
        if self.adapter.config.saved:  # which PEFT excludes itself, whether the kind has this entry or not
            made.exclude_modules = _excluded(self.adapter.config.saved, getattr(made, "exclude_modules", None))
        return made

    @cached_property
    def wrapped(self) -> Any:
        """PEFT's model.  CorruptError where it does not load the adapter."""
        import torch

        path = self.adapter.config.path
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            try:
                return self.wrap(hollow(self.base, self.chosen, self._of_shapes))
            except (ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
                raise CorruptError(f"PEFT does not load this adapter: {error}", path=path) from error

    def wrap(self, model: Any) -> Any:
        """The hollow `model` with the adapter in it."""
        state = {fqn: one.load() for fqn, one in self.factors.items()}
        with _decomposing_nothing() if self.adapter.config.kind == TINYLORA else nullcontext():
            return with_adapter(model, self.made, state, self.adapter.config.path)

    def _of_shapes(self, shapes: Mapping[str, Shape]) -> Any:
        """A model of the matrices among `shapes`, as PEFT needs the class and the shape of each layer that it adapts.

        transformers' Conv1D always has a bias.  Where its size does not tell it from other layers, the adapter's config
        does, which PEFT sets at each layer anew: so the others have to be of one class.
        """
        from peft.tuners.tuners_utils import check_target_module_exists

        shapes = {**{alias: shapes[owner] for alias, owner in self.base.ties.items()}, **shapes}
        matrices = {fqn.removesuffix(".weight"): shape for fqn, shape in shapes.items() if fqn.endswith(".weight")}
        matrices = {module: shape for module, shape in matrices.items() if len(shape) == 2}
        adapted = self.adapted or {one for one in matrices if check_target_module_exists(self.made, one)}
        if not self.adapted:
            self._check_named(matrices)
            if len(adapted) == 1 and not self.base.keeps_order:
                self.told.append(
                    f"the adapter does not list its layers: {next(iter(adapted))} is taken for the only one, and a "
                    "layer whose weight is another's is in no safetensors file"
                )
        order = ordered(self.adapter, self.base, matrices, adapted, self.factors)
        biases = {module: shapes[f"{module}.bias"][0] for module in matrices if f"{module}.bias" in shapes}
        classes = {one: CONV1D if biases.get(one, shape[0]) != shape[0] else LINEAR for one, shape in matrices.items()}
        square = {module for module in biases if len({*matrices[module]}) == 1}
        others = {classes[module] for module in biases.keys() - square}
        recorded = CONV1D if self.adapter.config.raw.get("fan_in_fan_out") else LINEAR
        for module in square & adapted:
            if others - {recorded}:
                raise UsageError(
                    "which class a square layer is of is not known: the base has layers of another one than the "
                    "adapter's config tells of",
                    path=self.adapter.path,
                    fqn=module,
                    expected=recorded,
                    found=" and ".join(sorted(others)),
                )
            classes[module] = recorded
        return model_of({one: made_layer(classes[one], matrices[one], has_bias=one in biases) for one in order})

    def _check_named(self, modules: Iterable[str]) -> None:
        """UsageError where the config names a layer that is none of `modules`, or may do so by a pattern."""
        named, known = self.made.target_modules, [f".{module}" for module in modules]
        is_pattern = isinstance(named, str)
        missing = [] if is_pattern else [one for one in named if not any(m.endswith(f".{one}") for m in known)]
        if not missing and not (is_pattern and not self.base.keeps_order):
            return
        which = "layers by a pattern" if is_pattern else "a layer that the base does not have"
        raise UsageError(
            f"the adapter's config names {which}, and what it adds goes by the order of all",
            path=self.adapter.config.path,
            fqn=None if is_pattern else min(missing),
            found=named if is_pattern else None,
            hint="a torch file has layers that share a weight with another, and safetensors files do not: "
            "torch.save(model.state_dict(), 'base/pytorch_model.bin'), and --base base",
        )

    @property
    def notes(self) -> Iterator[str]:
        """What the user has to know of how the adapter is merged."""
        return iter(self.told)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that the adapter changes."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules = self.wrapped.base_model.model.named_modules()
        return tuple(name for name, module in modules if isinstance(module, BaseTunerLayer))

    def merge(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight of `module` with what the adapter adds."""
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
        """What PEFT does to the weight of `module`."""

        def is_nothing() -> bool:
            fqn = f"{module}.weight"
            weight = self.stored(fqn).load().float()
            return bool((self.merge(module, weight.clone()) == weight).all())

        return Update(self.adapter.path, module, lambda weight: self.merge(module, weight), is_nothing)


def _excluded(saved: Sequence[str], others: str | Iterable[str] | None) -> str:
    """A pattern of the modules that are not adapted: those `saved` as a whole, whatever is below them, and `others`."""
    wholly = [rf"(.*\.)?{one}(\..*)?" for one in saved]  # patterns, as PEFT reads them
    if isinstance(others, str):
        return "|".join(f"(?:{one})" for one in (*wholly, others))
    return "|".join([*wholly, *(rf"(.*\.)?{re.escape(one)}" for one in others or ())])


def _decomposing_nothing() -> AbstractContextManager[Any]:
    """Takes every decomposition of a matrix for one of zeros.

    TinyLoRA decomposes each weight as PEFT makes its layers, and then has what the file says.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Decomposing(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            if function is not torch.linalg.svd:
                return function(*given, **(named or {}))
            (rows, columns), zero = given[0].shape, torch.zeros((), dtype=given[0].dtype)
            least = min(rows, columns)
            return zero.expand(rows, least), zero.expand(least), zero.expand(least, columns)

    return Decomposing()
