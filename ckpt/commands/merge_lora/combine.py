"""PEFT's own operations: combine adapters (`add_weighted_adapter`), convert transformers 4's adapters.

PEFT gets a model without weights to hold the adapters. The bits are the same as in the real model. With the same seed,
so are the random draws for `dare_*`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt.adapters import names
from ckpt.adapters.config import LORA, parse_config
from ckpt.adapters.names import parse_name
from ckpt.base.errors import LossError, UsageError
from ckpt.base.words import Message
from ckpt.commands.merge_lora.empty_model import empty_model
from ckpt.commands.merge_lora.find import Adapter, Factor
from ckpt.plan.checkpoint import TRANSFORMERS, Checkpoint
from ckpt.state.naming import to_namespace

COMBINATIONS = (
    *("linear", "cat", "svd", "ties", "dare_linear", "dare_ties", "magnitude_prune"),
    *("ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd"),
)
_NAME = "combined"


def combine(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    base: Checkpoint,
    combination: str,
    density: float | None = None,
    seed: int | None = None,
) -> Adapter:
    """Combine several adapters into one by PEFT's `combination_type`, or raise UsageError."""
    _check(adapters, weights, combination, density, seed)
    require_peft("combining adapters")
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    model = empty_model(to_namespace(base, TRANSFORMERS))
    configs = [LoraConfig.from_peft_type(**one.config.raw) for one in adapters]
    every = [f"adapter{number}" for number in range(len(adapters))]  # PEFT would take a bare number for a layer number
    options = {} if density is None else {"density": density}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the holding model has no name, and PEFT warns about it
        wrapped = get_peft_model(model, configs[0], adapter_name=every[0])
        for name, one, config in zip(every, adapters, configs, strict=True):
            if name != every[0]:
                wrapped.add_adapter(name, config)
            state = {fqn: factor.load() for fqn, factor in one.factors.items() if parse_name(fqn).kind != names.BASE}
            set_peft_model_state_dict(wrapped, state, adapter_name=name)
        if seed is not None:
            torch.manual_seed(seed)
        try:
            wrapped.add_weighted_adapter(every, list(weights), _NAME, combination, **options)
        except ValueError as error:
            raise UsageError(f"PEFT does not combine these adapters: {error}", path=adapters[0].path) from error
    combined = get_peft_model_state_dict(wrapped, adapter_name=_NAME, save_embedding_layers=False)
    first = adapters[0]
    of_all = (item for one in adapters for item in one.factors.items())
    factors = {fqn: factor for fqn, factor in of_all if parse_name(fqn).kind == names.BASE}
    factors |= {fqn: _in_memory(fqn, tensor, first.checkpoint) for fqn, tensor in combined.items()}
    raw = _plain_config(wrapped.peft_config[_NAME].to_dict())
    # The factors are already scaled. PEFT leaves the first adapter's rsLoRA on, and would scale them again, by the
    # rank's root (peft#3473, in 0.21.2).
    settings = parse_config(raw | {"use_rslora": False}, Path(first.config.path))
    shares = " and ".join(f"{weight} of {one.path}" for one, weight in zip(adapters, weights, strict=True))
    notes = (*(note for one in adapters for note in one.notes), f"combined by PEFT ({combination}): {shares}")
    if raw.get("use_rslora"):
        root = f"the root of its rank, {settings.rank}"
        notes = (*notes, f"the combined adapter is no rsLoRA one: PEFT itself would scale it once more, by {root}")
    others = tuple(one.checkpoint for one in adapters[1:])
    return Adapter(first.path, first.folder, settings, first.checkpoint, factors, notes, others)


def loaded(adapter: Adapter, base: Checkpoint) -> Adapter:
    """Return a single-expert adapter (transformers 4) after PEFT loads it onto stacked experts (transformers 5).

    Raise LossError if PEFT can't load one of its tensors.
    """
    require_peft("this adapter is of a model with single experts; stacking it")
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    whole = {"modules_to_save": None, "trainable_token_indices": None, "bias": "none"}
    config = LoraConfig.from_peft_type(**{**adapter.config.raw, **whole})
    lora = {fqn: f for fqn, f in adapter.factors.items() if parse_name(fqn).kind not in (names.BASE, names.TOKENS)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = get_peft_model(empty_model(to_namespace(base, TRANSFORMERS)), config)
            result = set_peft_model_state_dict(wrapped, {fqn: factor.load() for fqn, factor in lora.items()})
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"PEFT does not load this adapter: {error}", path=adapter.path) from error
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if result.unexpected_keys or missing:
        raise LossError(
            "the adapter doesn't fit this model in transformers 5",
            path=adapter.path,
            fqn=(result.unexpected_keys or missing)[0],
        )
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    factors = {fqn: factor for fqn, factor in adapter.factors.items() if fqn not in lora}
    factors |= {fqn: _in_memory(fqn, tensor, adapter.checkpoint) for fqn, tensor in state.items()}
    kept = {key: value for key, value in adapter.config.raw.items() if key in whole}
    settings = parse_config(_plain_config(wrapped.peft_config["default"].to_dict()) | kept, Path(adapter.config.path))
    settings = replace(settings, given_layout="rank_major")  # PEFT has just stacked them
    note = "the adapter is of single experts; PEFT has converted it to the stacked ones of transformers 5"
    return replace(adapter, config=settings, factors=factors, notes=(*adapter.notes, note))


def require_peft(what: str) -> None:
    if find_spec("peft") is None or find_spec("transformers") is None:
        raise UsageError(f"{what} needs PEFT", hint="pip install peft transformers")


def _check(
    adapters: Sequence[Adapter], weights: Sequence[float], combination: str, density: float | None, seed: int | None
) -> None:
    if len(weights) != len(adapters):
        raise UsageError(
            Message("{adapter_weights} needs one weight for each adapter"), expected=len(adapters), found=len(weights)
        )
    if combination not in COMBINATIONS:
        raise UsageError("unknown combination", expected=" ".join(COMBINATIONS), found=combination)
    prunes = combination.startswith(("ties", "dare", "magnitude"))
    if prunes != (density is not None):
        raise UsageError(
            Message("{combination} {} {density}", "needs" if prunes else "takes no", combination=combination)
        )
    if density is not None and not 0 < density <= 1:
        raise UsageError(Message("{density} must be above 0 and at most 1"), found=density)
    if combination.startswith("dare") != (seed is not None):
        raise UsageError(
            Message(
                "{combination} {} {seed}",
                "drops at random: give a" if seed is None else "takes no",
                combination=combination,
            )
        )
    for one in adapters:
        config = one.config
        for what, is_there in (
            (f"peft_type {config.kind}", config.kind != LORA),
            ("DoRA", config.use_dora),
            ("target_parameters", config.target_parameters),
            ("modules_to_save", config.saved),
            ("trained biases", config.bias != "none" or config.raw.get("lora_bias")),
            ("trained tokens", config.token_indices),
            ("another merge than W + BA", config.is_of_peft),
        ):
            if is_there:
                raise UsageError(f"adapters with {what} are not combined", path=config.path)


def _in_memory(fqn: str, tensor: Any, of: Checkpoint) -> Factor:
    return Factor(fqn, tuple(tensor.shape), lambda: tensor, of, is_held=True)


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
