"""Settings of an adapter: `adapter_config.json`, checked against the adapter's tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt.adapters import entries as adapter_entries
from ckpt.adapters import names as adapter
from ckpt.adapters import peft_rules, shapes, targets
from ckpt.adapters.config import KINDS, LORA, AdapterConfig, parse_config, settings_of
from ckpt.base.errors import CorruptError
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint

#: Heads that PEFT adds to `modules_to_save` for classification (`utils/constants.py`).
_HEADS = {"classifier", "score"}


def adapter_settings(checkpoint: Checkpoint) -> AdapterConfig:
    """Return the settings recorded next to the adapter.

    Raise CorruptError if PEFT could not load them.
    """
    layers = {name.module for name in map(adapter.parse_name, checkpoint.shapes) if name.kind == adapter.A}
    return checked_settings(checkpoint, *settings_of(checkpoint, layers=layers))


def checked_settings(
    checkpoint: Checkpoint,
    raw: Mapping[str, Any],
    path: Path,
    accepted: Collection[str] = (),
    *,
    entry_option: str = "",
    release_option: str = "",
) -> AdapterConfig:
    """Check `raw`, read from `path`, also against the tensors. Unknown entries in `accepted` are ignored."""
    parse_config(raw, path)
    adapter_entries.check(raw, path, accepted, option=entry_option)
    ranks = adapter.ranks(checkpoint, raw.get("peft_type"))
    config = parse_config(peft_rules.with_explicit_patterns(raw, path, ranks, option=release_option), path)
    if checkpoint.is_adapter:
        _check_tensors(checkpoint, config, ranks)
    return config


def adapter_differences(checkpoint: Checkpoint, config: AdapterConfig) -> tuple[list[str], list[str]]:
    """Return notes on layers that the config does not name, and names in `modules_to_save` without a tensor.

    Only the base tells if it has a module of such a name.
    """
    return list(targets.unnamed(config, _adapted(checkpoint, config))), _missing_modules(checkpoint, config)


def _missing_modules(checkpoint: Checkpoint, config: AdapterConfig) -> list[str]:
    if config.raw.get("ensure_weight_tying"):
        return []
    parsed = map(adapter.parse_name, checkpoint.shapes)
    modules = {name.module if name.kind == adapter.SAVED else name.module.rpartition(".")[0] for name in parsed}
    paths = {module[: match.start()] for module in modules for match in re.finditer(r"\.|$", module)}
    missing = {name for name in config.saved if not any(path.endswith(name) for path in paths)}
    # PEFT adds every head name, and a model has one
    return sorted(missing - _HEADS if _HEADS & {*config.saved} - missing else missing)


def _adapted(checkpoint: Checkpoint, config: AdapterConfig) -> set[str]:
    owners = [target.rpartition(".")[0] for target in config.target_parameters]
    if config.kind not in KINDS or "" in owners:  # any module may own a parameter named without its module
        return set()
    if config.kind == LORA:
        names = [adapter.parse_name(fqn) for fqn in checkpoint.shapes]
        modules = [name.module for name in names if name.kind in (adapter.A, adapter.EMBEDDING_A)]
    else:
        places = (shapes.place(config.kind, fqn) for fqn in checkpoint.shapes)
        modules = [place[0] for place in places if place is not None and place[0]]
    modules = [module.partition(".base_layer")[0] for module in modules]
    return {module for module in modules if not any(f".{module}".endswith(f".{owner}") for owner in owners)}


def _check_tensors(checkpoint: Checkpoint, config: AdapterConfig, ranks: Mapping[str, int]) -> None:
    targets.check(config, _adapted(checkpoint, config))
    shapes.check(config, checkpoint.shapes, checkpoint.path)
    if config.kind == LORA:
        _check_factors(checkpoint, config, ranks)
    kinds = {adapter.parse_name(fqn).kind for fqn in checkpoint.shapes}
    if config.token_indices not in (None, {}) and adapter.TOKENS not in kinds:
        raise CorruptError(
            "the adapter lacks the trained token rows",
            path=checkpoint.path,
            expected=f"a {adapter.TOKENS} tensor (trainable_token_indices is set)",
            found="none",
        )


def _check_factors(checkpoint: Checkpoint, config: AdapterConfig, ranks: Mapping[str, int]) -> None:
    modules: dict[tuple[str | None, str], set[str]] = defaultdict(set)
    for name in (adapter.parse_name(fqn) for fqn, role in checkpoint.tensors if role in MODEL_ROLES):
        modules[name.adapter, name.module].add(name.kind)
    for (_, module), parts in modules.items():
        adapter.check_factors(
            module, parts, config.optional_tensors, checkpoint.path, has_other_layers=bool(config.target_parameters)
        )
    for module, rank in ranks.items() if not config.target_parameters else ():
        config.scaling(module)
        is_own = ".base_layer." not in module  # patterns match the wrapped module, such as nn.MultiheadAttention
        if is_own and config.rank_of(module) != rank:
            raise CorruptError(
                "the adapter's config and its weights have different ranks",
                path=checkpoint.path,
                fqn=module,
                expected=f"rank {config.rank_of(module)}, from {config.path}",
                found=f"rank {rank}",
            )
    for fqn, shape in checkpoint.shapes.items():
        name = adapter.parse_name(fqn)
        if name.kind in (adapter.B, adapter.EMBEDDING_B) and len(shape) == 2 and name.module in ranks:
            blocks = _blocks_of_b(config, name.module) if name.kind == adapter.B else 1
            if shape[1] * blocks != ranks[name.module]:
                raise CorruptError(
                    "a layer's two factors have different ranks",
                    path=checkpoint.path,
                    fqn=fqn,
                    expected=f"rank {ranks[name.module]}" + (f" in {blocks} blocks" if blocks > 1 else ""),
                    found=f"shape {list(shape)}; use_bdlora: {config.raw.get('use_bdlora')!r}",
                )


def _blocks_of_b(config: AdapterConfig, module: str) -> int:
    """Return the number of blocks in `lora_B`: BD-LoRA has several (peft `tuners/lora/variants.py`)."""
    settings = config.raw.get("use_bdlora")
    if not isinstance(settings, Mapping):
        return 1
    in_a, in_b = (any(part in module for part in settings.get(f"target_modules_bd_{one}") or ()) for one in ("a", "b"))
    if (in_a and in_b) or (settings.get("match_strict", True) and not (in_a or in_b)):
        raise CorruptError(
            "use_bdlora in the adapter's config leaves this layer's division unclear, so PEFT does not load it",
            path=config.path,
            fqn=module,
            expected="the layer in either target_modules_bd_a or target_modules_bd_b, or match_strict false",
            found=repr(settings),
        )
    return int(settings.get("nblocks", 1)) if in_b else 1
