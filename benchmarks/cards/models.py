"""Released models: their public configs, and the parallel sizes of Megatron that move them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cards.journey import Sizes
from benchmarks.cards.lora import Lora

_FILE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Model:
    """`trained` are published sizes if `trained_source` says where, or else an example. `ranks` are ZeRO-3's.

    With `lora` an adapter is moved and merged.
    """

    name: str
    config: dict[str, Any]
    source: str
    trained: Sizes
    trained_source: str
    other: Sizes
    ranks: tuple[int, int]
    lora: Lora | None = None


def models() -> dict[str, Model]:
    return {name: _model(name, entry) for name, entry in json.loads(_FILE.read_text()).items()}


def _model(name: str, entry: dict[str, Any]) -> Model:
    trained, other = (
        Sizes(**{**entry[key], "options": tuple(entry[key].get("options", ()))}) for key in ("trained", "other")
    )
    first, second = entry.get("ranks", (8, 6))
    lora = Lora(**{**entry["lora"], "targets": tuple(entry["lora"]["targets"])}) if "lora" in entry else None
    told = entry.get("trained_source", "")
    return Model(name, entry["config"], entry["source"], trained, told, other, (first, second), lora)
