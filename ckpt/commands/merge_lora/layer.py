"""Merges by PEFT itself, one layer at a time, for adapters other than a simple W + BA on the base.

- Block-diagonal LoRA, KaSA, VeLoRA and MonteCLoRA (peft 0.21.2, `tuners/lora/variants.py`).
- Inits computed from the base weight and subtracted on loading (PiSSA, OLoRA), or rounded differently (MiCA).
- PEFT's other methods (LoHa, LoKr, IA3, OFT, ...).

Each layer is merged in a model of its own, under its own name: rank and block patterns match names.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ckpt.adapters import entries as adapter_entries
from ckpt.adapters import shapes
from ckpt.adapters.config import ADAMSS, KINDS, LORA, OF_PEFT, AdapterConfig
from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.commands.merge_lora.effect import Update
from ckpt.commands.merge_lora.find import Adapter, Factor

if TYPE_CHECKING:
    import torch

_ELSEWHERE = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "ensure_weight_tying"),
)
LINEAR, CONV1D = "Linear", "Conv1D"
#: Computed by PEFT from the base.
_PROJECTION = ".adamss_newB"
#: Another processor or bf16 stays below.
_TOLERANCE = 0.02
PEFT_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError),
    *(ValueError, re.error),
)
_LOCK = threading.Lock()  # PEFT draws random numbers and changes torch's settings


def merge_layer(
    config: AdapterConfig,
    module: str,
    layer: str,
    parameters: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Merge an adapter's `state`, under PEFT's names, into the `parameters` of `module`.

    `layer` is `module`'s class. Raise CorruptError if PEFT can't load the adapter, UsageError for an unknown kind.
    """
    import torch
    from peft import PeftConfig

    with _LOCK, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            made: Any = PeftConfig.from_peft_type(**_settings(config, module, state))
            recorded = [key for key in OF_PEFT if config.raw.get(key) is not None]
            if lacking := [key for key in recorded if getattr(made, key, None) is None]:
                raise UsageError(
                    "the installed PEFT doesn't know this adapter type", path=config.path, found=", ".join(lacking)
                )
            wrapped = with_adapter(_alone(module, layer, parameters), made, state, config.path)
            merged = wrapped.merge_and_unload().get_submodule(module)
        except PEFT_ERRORS as error:
            raise CorruptError(f"PEFT does not load this adapter: {error}", path=config.path, fqn=module) from error
        return {name: parameter.detach() for name, parameter in merged.named_parameters()}


def check_installed(config: AdapterConfig) -> None:
    """Raise UsageError if the installed PEFT does not merge this kind, or ignores an entry that changes it."""
    import dataclasses

    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    made = next((one for kind, one in PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind == config.kind), None)
    tuner = next((one for kind, one in PEFT_TYPE_TO_TUNER_MAPPING.items() if kind == config.kind), None)
    if made is None:
        raise UsageError(
            "the installed PEFT doesn't know this adapter type",
            path=config.path,
            found=f"peft_type {config.kind!r}, peft {version('peft')}",
            hint="pip install -U peft",
        )
    if not hasattr(tuner, "merge_and_unload"):
        raise UsageError("PEFT can't merge this adapter type", path=config.path, found=f"peft_type {config.kind}")
    known = {field.name for field in dataclasses.fields(made)}
    entries = adapter_entries.relevant(config.raw) if config.kind in KINDS else adapter_entries.turned_on(config.raw)
    if lacking := [key for key in entries if key not in known]:
        raise UsageError(
            "the installed PEFT does not know this adapter's settings",
            path=config.path,
            found=", ".join(lacking),
            hint="pip install -U peft",
        )


def with_adapter(model: Any, made: Any, state: Mapping[str, torch.Tensor], path: str) -> Any:
    """Return PEFT's version of `model`, or raise CorruptError for unexpected or missing tensors."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    wrapped = get_peft_model(model, made)
    if made.peft_type == ADAMSS:
        check_made_of_base(get_peft_model_state_dict(wrapped, save_embedding_layers=False), state, path)
    result = set_peft_model_state_dict(wrapped, dict(state))
    if result.unexpected_keys:
        raise CorruptError("PEFT doesn't expect a tensor in this adapter", path=path, fqn=result.unexpected_keys[0])
    if lacking := get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys() - state.keys():
        raise CorruptError("the adapter lacks a tensor in this layer", path=path, fqn=min(lacking))
    return wrapped


def check_made_of_base(made: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], path: str) -> None:
    """Raise LossError if the factors in `state` belong to other rows than PEFT's tensors in `made`.

    AdaMSS's factors belong to groups of rows. No file records them: PEFT finds them again with scikit-learn, and
    continues if they differ. The saved projection and the group sizes show a difference.
    """
    for fqn, tensor in made.items():
        saved = state.get(fqn)
        if saved is None:
            continue
        why, found = None, f"shape {list(saved.shape)}"
        if saved.shape != tensor.shape:
            why = f"shape {list(tensor.shape)}, by the groups of rows that PEFT finds in this base"
        elif fqn.endswith(_PROJECTION) and not _are_near(tensor, saved):
            why, found = "the projection that PEFT makes of this base", "another one"
        if why is not None:
            raise LossError(
                "unknown rows for this adapter's factors: it was trained on another base, or on a device with other "
                "random numbers, for example a GPU",
                path=path,
                fqn=fqn,
                expected=why,
                found=found,
                hint="merge it in Python, on the same kind of device: PeftModel.from_pretrained, merge_and_unload, "
                "save_pretrained",
            )


def _are_near(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    one, other = tensor.double(), saved.double()
    return bool(((one - other).norm(dim=1) <= _TOLERANCE * other.norm(dim=1)).all())


def updates(
    adapter: Adapter, module: str, layer: str, parameters: Mapping[str, Factor], state: Mapping[str, Factor]
) -> Iterator[tuple[str, Update]]:
    one = _PeftLayer(adapter, module, layer, parameters, state)
    for name in parameters:
        yield name, Update(adapter.path, module, partial(one.merged, name), lambda: one.is_nothing)


@dataclass(eq=False)
class _PeftLayer:
    """A layer. `kept` holds merged parameters until they are used."""

    adapter: Adapter
    module: str
    layer: str
    parameters: Mapping[str, Factor]
    state: Mapping[str, Factor]
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def merged(self, name: str, one: torch.Tensor) -> torch.Tensor:
        with self.lock:
            if name not in self.kept:
                self.kept = self._merge({**self._loaded(besides=name), name: one})
            return self.kept.pop(name)

    @cached_property
    def is_nothing(self) -> bool:
        """True if the merge adds nothing, even in fp32."""
        before = {name: tensor.float() for name, tensor in self._loaded().items()}
        after = self._merge({name: tensor.clone() for name, tensor in before.items()})
        return all(bool((after[name] == tensor).all()) for name, tensor in before.items())

    def _loaded(self, besides: str | None = None) -> dict[str, torch.Tensor]:
        return {name: factor.load() for name, factor in self.parameters.items() if name != besides}

    def _merge(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = {factor.fqn: factor.load() for factor in self.state.values()}
        return merge_layer(self.adapter.config, self.module, self.layer, parameters, state)


def _settings(config: AdapterConfig, module: str, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found = {key: value for key, value in config.raw.items() if key not in _ELSEWHERE}
    found |= {"target_modules": [module], "task_type": None} | ({"bias": "none"} if "bias" in found else {})
    if config.kind == LORA:
        return found | {"lora_dropout": 0.0}
    if found.get(shapes.PROPORTIONAL):  # the layer's share of all layers' frequencies
        number = next(tensor.shape[0] for fqn, tensor in state.items() if fqn.endswith(f".{shapes.SPECTRUM}"))
        found |= {shapes.PROPORTIONAL: False, "n_frequency": number, "n_frequency_pattern": {}}
    given = found.get("feedforward_modules")
    if given is not None:  # IA3 scales these layers' inputs instead of their outputs
        named = re.fullmatch(given, module) if isinstance(given, str) else module.endswith(tuple(given))
        found["feedforward_modules"] = [module] if named else []
    if isinstance(ranks := found.get("rank_pattern"), Mapping) and config.kind == "ADALORA":  # for all layers
        found["rank_pattern"] = {key: kept for key, kept in ranks.items() if key.startswith(f"{module}.lora_")} or None
    return found


def _alone(module: str, layer: str, parameters: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    from torch import nn

    made = empty_layer(layer, parameters["weight"].shape, has_bias="bias" in parameters)
    for name, tensor in parameters.items():
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return model_of({module: made})


def model_of(layers: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return a model with only these `layers`. A layer must come before the layers below it."""
    from torch import nn

    root = nn.Module()
    for module in layers:
        inner = root
        *path, leaf = module.split(".")
        for name in path:
            if not hasattr(inner, name):
                inner.add_module(name, nn.Module())
            inner = inner.get_submodule(name)
        inner.add_module(leaf, layers[module])
    return root


def empty_layer(layer: str, shape: tuple[int, ...], *, has_bias: bool) -> torch.nn.Module:
    import torch
    from torch import nn

    with torch.device("meta"):
        if layer == "Embedding":
            return nn.Embedding(*shape)
        if layer == CONV1D:
            from transformers.pytorch_utils import Conv1D

            made: nn.Module = Conv1D(shape[1], shape[0])
            return made
        if layer == LINEAR:
            return nn.Linear(shape[1], shape[0], bias=has_bias)
        convolution: nn.Module = getattr(nn, layer)(shape[1], shape[0], shape[2:], bias=has_bias)
        return convolution
