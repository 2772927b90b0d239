"""Settings of an adapter: `adapter_config.json`, checked against the adapter's tensors.

Every command that computes with an adapter reads its settings here, and `ckpt check` does, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt.adapters import entries as adapter_entries
from ckpt.adapters import names as adapter
from ckpt.adapters import peft_rules
from ckpt.adapters.config import LORA, AdapterConfig, parse_config, settings_of
from ckpt.base.errors import CorruptError
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint


def adapter_settings(checkpoint: Checkpoint) -> AdapterConfig:
    """Return the settings recorded next to the adapter in `checkpoint`.

    Raise CorruptError if PEFT could not load them, and LossError or UsageError if they are not merged here.
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
    """Return the settings `raw`, read from `path`, after checking every entry and the adapter's tensors.

    Unknown entries in `accepted` are ignored. Hints name the command's options for entries and for PEFT's release.
    """
    parse_config(raw, path)
    adapter_entries.check(raw, path, accepted, option=entry_option)
    ranks = adapter.ranks(checkpoint, raw.get("peft_type"))
    config = parse_config(peft_rules.with_explicit_patterns(raw, path, ranks, option=release_option), path)
    if checkpoint.is_adapter and config.kind == LORA:
        _check_tensors(checkpoint, config, ranks)
    return config


def _check_tensors(checkpoint: Checkpoint, config: AdapterConfig, ranks: Mapping[str, int]) -> None:
    """Raise CorruptError if the tensors of a LoRA adapter contradict its settings."""
    modules: dict[tuple[str | None, str], set[str]] = defaultdict(set)
    for name in (adapter.parse_name(fqn) for fqn, role in checkpoint.tensors if role in MODEL_ROLES):
        modules[name.adapter, name.module].add(name.kind)
    for (_, module), parts in modules.items():
        adapter.check_factors(
            module, parts, config.optional_tensors, checkpoint.path, has_other_layers=bool(config.target_parameters)
        )
    if config.token_indices is not None and not any(adapter.TOKENS in parts for parts in modules.values()):
        raise CorruptError(
            "the rows of trained tokens are missing from the adapter",
            path=checkpoint.path,
            expected=f"a {adapter.TOKENS} tensor, as trainable_token_indices is set",
            found="none",
        )
    for module, rank in ranks.items() if not (config.is_of_peft or config.target_parameters) else ():
        config.scaling(module)
        is_own = ".base_layer." not in module  # patterns name the module that PEFT wraps, such as nn.MultiheadAttention
        if is_own and config.rank_of(module) != rank:
            raise CorruptError(
                "the adapter's config and its weights have different ranks",
                path=checkpoint.path,
                fqn=module,
                expected=f"rank {config.rank_of(module)}, as {config.path} says",
                found=f"rank {rank}",
            )
