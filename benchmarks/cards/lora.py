"""An adapter of a model's linear layers: PEFT's names, shapes and config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cards.windows import Shape

#: Folders of the adapter, and of the result of PEFT's merge.
ADAPTER, MERGED = "adapter", "merged-by-peft"

_PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Lora:
    """`targets` are layers' last names."""

    rank: int
    alpha: int
    targets: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        targets = list(self.targets)
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}

    @property
    def title(self) -> str:
        return f"LoRA of rank {self.rank}, alpha {self.alpha}, on {', '.join(self.targets)}"

    def is_target(self, name: str) -> bool:
        return name.removesuffix(_WEIGHT).rpartition(".")[2] in self.targets

    def factors(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for name, (rows, *columns) in shapes.items():
            if self.is_target(name):
                module = _PREFIX + name.removesuffix(_WEIGHT)
                found[f"{module}.lora_A.weight"] = (self.rank, *columns)
                found[f"{module}.lora_B.weight"] = (rows, self.rank)
        return found


def read(config: Mapping[str, Any]) -> Lora:
    return Lora(config["r"], config["lora_alpha"], tuple(config["target_modules"]))
