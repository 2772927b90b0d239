"""Modules in `converters` that know adapters' settings and names (see `ckpt.plan.services`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.base.entries import lazy_module

if TYPE_CHECKING:
    from ckpt.adapters.config import AdapterConfig
    from ckpt.plan.checkpoint import Checkpoint


class SettingsProtocol(Protocol):
    def adapter_settings(self, checkpoint: Checkpoint) -> AdapterConfig: ...
    def checked_settings(
        self,
        checkpoint: Checkpoint,
        raw: Mapping[str, Any],
        path: Path,
        accepted: Collection[str] = (),
        *,
        entry_option: str = "",
        release_option: str = "",
    ) -> AdapterConfig: ...
    def adapter_differences(self, checkpoint: Checkpoint, config: AdapterConfig) -> tuple[list[str], list[str]]: ...


class NamesProtocol(Protocol):
    def prove_names(self, folder: Path) -> None: ...


settings: SettingsProtocol = lazy_module("converters.names.adapter_settings")
names: NamesProtocol = lazy_module("converters.huggingface.peft")
