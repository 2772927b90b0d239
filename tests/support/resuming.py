"""Runs that stop, are converted and resume: the shared part of their tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOUNDS = {"bf16": 5e-4, "fp32": 1e-6}
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
#: `ckpt` formats written by --save native.
FORMATS = {"ddp": "full", "fsdp1": "dcp", "fsdp2": "dcp"}


def format_of(strategy: str) -> str:
    return FORMATS.get(strategy, strategy)


@dataclass(frozen=True)
class Run:
    """An engine and its rank count."""

    strategy: str
    ranks: int
    dtype: str = "bf16"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        options = "".join(f" {value}" for _, value in self.options)
        return f"{self.strategy}{options} on {self.ranks}"

    @property
    def folder(self) -> str:
        return f"{self.name} in {self.dtype}".replace(" ", "_")

    @property
    def format(self) -> str:
        """Its checkpoints' format in `ckpt`."""
        return format_of(self.strategy)

    def job(self, output: Path, steps: int, **more: Any) -> dict[str, Any]:
        options = {"strategy": self.strategy, "dtype": self.dtype, "steps": steps, "output": str(output)}
        return options | dict(self.options) | more


@dataclass(frozen=True)
class Row:
    """From one run to another.

    `through` lists the formats in turn; if it is empty, `ckpt.resume` converts. `load` is DeepSpeed's config, `own` the
    options to resume without a conversion.
    """

    source: Run
    target: Run
    through: tuple[str, ...] = ()
    equal: bool = False
    load: dict[str, Any] = field(default_factory=dict, compare=False)
    own: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        through = "".join(f"{format} -> " for format in (self.through if self.load else self.through[:-1]))
        return f"{self.source.name} -> {through}{self.target.name}"

    @property
    def folder(self) -> str:
        """Folder name, unique per row: several rows may share the same two runs."""
        through = "".join(f" by {format}" for format in self.through)
        return f"{self.source.name} to {self.target.name}{through} in {self.source.dtype}".replace(" ", "_")


def losses(run: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def options(run: Path) -> list[list[dict[str, Any]]]:
    """Return the live optimizer's hyperparameters for each step and param group."""
    return [
        [{name: group[name] for name in HYPERPARAMETERS} for group in groups]
        for groups in json.loads((run / "options.json").read_text())
    ]


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest relative difference over steps 5 to 8."""
    return max(abs(one[step] - other[step]) / other[step] for step in range(5, 9))


def shown(difference: float) -> str:
    return f"{difference:.1e}" if difference else "equal"


def title(dtype: str) -> str:
    return f"4 steps, conversion, 4 steps ({dtype}): loss of each, and of the unbroken run of the source"


def side_by_side(rest: dict[int, float], whole: dict[int, float]) -> dict[str, str]:
    """Return a row's cells: each loss next to the unbroken run's, and the largest difference."""
    cells = {f"step {step}": f"{loss:.6f} {whole[step]:.6f}" for step, loss in rest.items()}
    return cells | {"relative": shown(apart(rest, whole))}
