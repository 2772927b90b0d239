"""Modules of `converters` that know settings and names of adapters (see `ckpt.plan.services`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from ckpt.adapters.config import AdapterConfig
from ckpt.base.entries import late
from ckpt.plan.checkpoint import Checkpoint


class SettingsProtocol(Protocol):
    """The settings of an adapter, checked entry by entry: those next to it, or given ones."""

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


class NamesProtocol(Protocol):
    """Proof that an adapter's names are ones that PEFT loads."""

    def prove_names(self, folder: Path) -> None: ...


settings: SettingsProtocol = late("converters.names.adapter_settings")
names: NamesProtocol = late("converters.huggingface.peft")
