"""Verification cards: `python -m benchmarks.cards MODEL` moves a released model and writes `docs/cards/MODEL.md`.

A page is only written if every tensor was the same at every station.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cards.journey import Journey, Moved, journeys, most_elements, travel
from benchmarks.cards.models import Model, models
from benchmarks.cards.page import Card, Circumstances, index, page
from benchmarks.cards.windows import Shape, Window, narrowed, part, windows
from benchmarks.measure import PYTHON, remove, timed

CARDS = Path(__file__).parents[2] / "docs" / "cards"
_PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")


def main() -> None:
    known = models()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"one of {', '.join(known)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ckpt-cards"), help="folder for checkpoints")
    parser.add_argument("--disk", type=float, default=100, help="GB that may be used there (default: 100)")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--part", action="store_true", help="move only as much as holds each kind of layer once")
    parts.add_argument("--part-states", action="store_true", help="the same in the second journey; all in the first")
    parser.add_argument(
        "--narrow", type=int, default=1, metavar="N", help="keep one in N heads, and as much of the MLPs' inner width"
    )
    parser.add_argument("--pages", type=Path, default=CARDS, help="folder for pages (default: docs/cards)")
    options = parser.parse_args()
    if unknown := set(options.models) - known.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.pages.mkdir(parents=True, exist_ok=True)
    for name in options.models or known:
        card = made(known[name], options.folder, options.disk, options.part, options.narrow, options.part_states)
        (options.pages / f"{name}.md").write_text(page(card))
        (options.pages / "index.md").write_text(index(options.pages, known))
        print(options.pages / f"{name}.md", flush=True)


def made(
    model: Model,
    folder: Path,
    disk_gb: float,
    part_only: bool = False,
    narrow: int = 1,
    part_states: bool = False,
) -> Card:
    """Move the model through all journeys."""
    released, shapes = model, shapes_of(model, folder)
    whole = shapes
    if narrow > 1:
        model = replace(model, config=narrowed(model.config, narrow))
        shapes = shapes_of(model, folder)
    found: list[tuple[Journey, tuple[Moved, ...]]] = []
    for number, chosen in enumerate(_chosen(model, shapes, int(disk_gb * 1e9), part_only, part_states)):
        journey = _journeys(model)[number]
        moved = []
        for window in chosen:
            trained, other = (one.fitted(model.config, window) for one in (model.trained, model.other))
            fitted = _journeys(replace(model, trained=trained, other=other))[number]
            moved.append(travel(fitted, model.config, window, folder / model.name, model.ranks[0]))
            print(f"{model.name}: {journey.title.lower()}, layers {window.start} to {window.stop - 1}", flush=True)
        if moved:
            is_part = part_only or (part_states and number == 1)
            check_held(moved, model.config, journey.held(shapes), not is_part)
        found.append((journey, tuple(moved)))
    options = f"--disk {disk_gb:g}{' --part' if part_only else ''}{' --part-states' if part_states else ''}"
    options += f" --narrow {narrow}" if narrow > 1 else ""
    return Card(released, circumstances(folder, options), whole, tuple(found), narrow)


def _chosen(
    model: Model, shapes: Mapping[str, Shape], disk: int, part_only: bool, part_states: bool
) -> list[list[Window]]:
    """Return each journey's windows. A part is the same in both, or too large for the second and left out there."""
    limits = [most_elements(journey, disk) for journey in _journeys(model)]
    try:
        if part_states:
            return [windows(model.config, shapes, limits[0]), part(model.config, shapes, limits[1])]
        if not part_only:
            return [windows(model.config, shapes, most) for most in limits]
        with contextlib.suppress(ValueError):
            return [part(model.config, shapes, min(limits))] * len(limits)
        return [part(model.config, shapes, max(limits)), []]
    except ValueError as error:
        raise SystemExit(f"{model.name}: {error}; use more --disk") from error


def _journeys(model: Model) -> tuple[Journey, Journey]:
    return journeys(model.trained, model.other, model.ranks, model.lora)


def shapes_of(model: Model, folder: Path) -> dict[str, Shape]:
    """Return all tensors' shapes on the Hub."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{model.name}.json"
    config.write_text(json.dumps(model.config))
    _, output = timed("shapes", [PYTHON, "-m", "benchmarks.cards.source", "shapes", config])
    remove([config])
    return {name: tuple(shape) for name, shape in json.loads(output.strip().rpartition("\n")[2]).items()}


def check_held(moved: Sequence[Moved], config: Mapping[str, Any], shapes: Mapping[str, Shape], whole: bool) -> None:
    """Raise RuntimeError unless each window held exactly its part, and a whole model's windows all tensors."""
    expected: dict[str, Shape] = {}
    for one in moved:
        part_of = {name: one.window.shape(config, name, shape) for name, shape in shapes.items()}
        wanted = {name: shape for name, shape in part_of.items() if shape is not None}
        held = {name: value[1] for (kind, name, _), value in one.tensors.items() if kind == "weights"}
        if wrong := sorted(name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name)):
            raise RuntimeError(f"{len(wrong)} tensors of a window are missing or have another shape: {wrong[:5]}")
        expected |= held
    if whole and (wrong := sorted(shapes.items() - expected.items())):
        raise RuntimeError(f"{len(wrong)} tensors of the model were in no window: {wrong[:5]}")


def circumstances(folder: Path, options: str) -> Circumstances:
    describe = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CARDS.parents[1], text=True, capture_output=True, check=True
    )
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], text=True, capture_output=True, check=True).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return Circumstances(
        datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0"),
        f"{os.cpu_count()} processors, {memory:.0f} GB of memory and {kind}, load {os.getloadavg()[0]:.1f} at the end",
        describe.stdout.strip(),
        tuple(versions),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
