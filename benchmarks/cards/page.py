"""Page of a card, in Markdown. Every figure comes from the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from benchmarks.cards.journey import Journey, Moved, Tensors, together
from benchmarks.cards.models import Model
from benchmarks.cards.windows import Shape, num_experts, num_layers, num_rows

_INDEX = """# Verification cards

Each card is one run of `make cards`: a released model's config, tensors filled with random bits, and their way from
Hugging Face through Megatron, other sizes, ZeRO-3 on two numbers of ranks and DCP, and back. A second journey carries
fp32 masters and Adam's states. An adapter goes to Megatron and back instead, and its merge takes the first journey. No
weights were downloaded or trained. The table below names how much of each model was moved: of most, a small part.

- A generator seeded by each tensor's name makes any bit pattern: -0.0, infinities, subnormal numbers, NaN with any
  payload. Exceptions: Qwen3.5's gated norms are numbers of bf16 from 0.5 to 2, because Megatron stores one less. An
  adapter, and the weights that it changes, have no infinities and NaNs.
- At the source and every station, `ckpt hash --dtype bf16` gave each tensor the generator's digest, and after a merge
  the digest of the tensor that PEFT's `merge_and_unload` saved. At the end torch and safetensors alone compared the
  last checkpoint with the source, or with PEFT's (`benchmarks/equal.py`). A page is only written if all were equal.
- DCP keeps the masters as its weights, so `--dtype bf16` rounds them there. The last checkpoint was made from it, and
  its masters were compared in full.
- A model larger than the disk goes through in windows. A window is a model of its own: its layers count from 0, it has
  the tensors outside the layers, and its pipeline and expert ranks divide what it has. With `PART=1` a window is cut to
  hold each kind of layer once, and `NARROW=4` leaves a quarter of the heads and of the MLPs' inner width. A card names
  what it moved, and nothing else of the model was run.
- Each command was a process of its own. The page cache was left alone, and other programs ran."""

_COUNTED = ("weight", "master")
_BOTH = "Weights, masters and Adam's states"
_KINDS = {
    "weights": "weights, bf16",
    "masters": "masters, fp32",
    "optimizer": "Adam's two states, fp32, and steps",
}


@dataclass(frozen=True)
class Circumstances:
    day: str
    machine: str
    commit: str
    versions: tuple[str, ...]
    options: str


@dataclass(frozen=True)
class Card:
    """`shapes` are the whole model's; one in `narrow` heads moved. A journey without windows did not run."""

    model: Model
    circumstances: Circumstances
    shapes: Mapping[str, Shape]
    journeys: tuple[tuple[Journey, tuple[Moved, ...]], ...]
    narrow: int = 1


def page(card: Card) -> str:
    model, here = card.model, card.circumstances
    lines = [
        f"# {model.name}",
        "",
        _summary(card),
        "",
        f"    python -m benchmarks.cards {model.name} {here.options}",
        "",
        "| | |",
        "| --- | --- |",
        f"| config | {model.source} |",
        *([] if model.lora is None else [f"| adapter | {model.lora.title} |"]),
        f"| Megatron's first sizes | {model.trained_source or 'an example'} |",
        f"| day | {here.day} |",
        f"| machine | {here.machine} |",
        f"| commit | {here.commit} |",
        f"| versions | {', '.join(here.versions)} |",
    ]
    for journey, moved in card.journeys:
        if moved:
            lines += ["", f"## {journey.title}", "", *_journey(journey, moved)]
    return "\n".join([*lines, "", "## Config", "", *_indented(json.dumps(model.config, indent=1)), ""])


def index(folder: Path, known: Iterable[str]) -> str:
    """Return a page that names the cards in the folder, how much each moved, and all together."""
    cards = {name: path.read_text() for name in known if (path := folder / f"{name}.md").exists()}
    rows = ["| model | moved |", "| --- | --- |"]
    for name in known:
        told = re.findall(r"\*\*(.+?)\*\*", cards[name].splitlines()[2]) if name in cards else ["nothing"]
        rows.append(f"| {f'[{name}]({name}.md)' if name in cards else name} | {'; '.join(told)} |")
    return "\n".join([_INDEX, "", _total(list(cards.values())), "", *rows, ""])


def _total(cards: Sequence[str]) -> str:
    moved = [re.findall(r"([\d,]+) tensors, ([\d,]+) elements", card)[0] for card in cards]
    tensors, elements = (sum(_number(one[n]) for one in moved) for n in range(2))
    whole = sum(": a part, " not in card.splitlines()[2] for card in cards)
    conversions, size, seconds = 0, 0, 0.0
    for journey in "\n".join(cards).split("\n## "):
        windows = re.search(r"^(\d+) windows of layers", journey, re.MULTILINE)
        stations = re.findall(r"^\| \d\. .+?\| ([\d,]+) \| ([\d.]+) \|", journey, re.MULTILINE)
        conversions += len(stations) * (int(windows[1]) if windows else 1)
        size += sum(_number(one) for one, _ in stations)
        seconds += sum(float(one) for _, one in stations)
    return (
        f"{len(cards)} models, {whole} of them whole: {tensors:,} tensors of {elements:,} elements. {conversions} "
        f"conversions wrote {size:,} bytes in {seconds:,.0f} s. No tensor differed."
    )


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _summary(card: Card) -> str:
    """Return how much of the model went through, in each journey if they differ."""
    weights, states = card.journeys
    if [one.window for one in weights[1]] == [one.window for one in states[1]]:
        title = _BOTH if weights[0].lora is None else f"{weights[0].title}, and the {states[0].title.lower()}"
        return _moved(card, title, weights[1])
    return " ".join(_moved(card, journey.title, moved) for journey, moved in card.journeys)


def _moved(card: Card, title: str, moved: Sequence[Moved]) -> str:
    if not moved:
        return f"**{title}: not run**, for lack of disk."
    config = card.model.config
    held = {key[1]: prod(value[1]) for one in moved for key, value in one.tensors.items() if key[2] in _COUNTED}
    whole = {name: prod(shape) for name, shape in card.shapes.items()}
    if sum(held.values()) == sum(whole.values()):
        return f"**{title}: whole**, {_sizes(len(held), sum(held.values()))}."
    parts = []
    for one in moved:
        window, first = one.window, one.window.start
        layers = f"layer {first}" if window.stop == first + 1 else f"layers {first} to {window.stop - 1}"
        words = [f"{layers} of 0 to {num_layers(config) - 1}"]
        words += [f"the first {window.experts} of {num_experts(config)} experts"] if window.experts else []
        words += [f"the first {window.rows:,} of {num_rows(config):,} rows of the vocabulary"] if window.rows else []
        if card.narrow > 1:
            tower = ", and of the vision tower's layers" if "vision_config" in config else ""
            words.append(f"1/{card.narrow} of the heads and of the MLPs' inner width{tower}")
        parts.append(", ".join(words))
    share = 100 * sum(held.values()) / sum(whole.values())
    moved_of = f"Moved: {_sizes(len(held), sum(held.values()))}; whole: {_sizes(len(whole), sum(whole.values()))}."
    return f"**{title}: a part, {share:.2g} % of the elements**: {'; '.join(parts)}. {moved_of} The rest was not run."


def _sizes(tensors: int, elements: int) -> str:
    return f"{tensors:,} tensors, {elements:,} elements, {2 * elements:,} bytes in bf16"


def _journey(journey: Journey, moved: Sequence[Moved]) -> list[str]:
    lines = []
    if len(moved) > 1:
        layers = ", ".join(f"{one.window.start} to {one.window.stop - 1}" for one in moved)
        lines += [
            f"{len(moved)} windows of layers, one after another: {layers}. The digests are of all together. The first "
            "window's commands:",
            "",
        ]
    lines += _indented("\n".join(" ".join(stop.command) for stop in moved[0].stops))
    lines += ["", "| held | tensors | elements | bytes | digest (xxh3-128) |", "| --- | --- | --- | --- | --- |"]
    for kind, digest, tensors in together(moved):
        count, size = _elements(tensors)
        name = "factors, fp32" if journey.source == "peft" else _KINDS[kind]
        lines.append(f"| {name} | {len(tensors):,} | {count:,} | {size:,} | `{digest}` |")
    lines += [
        "",
        "| station | equal | bytes on disk | seconds | cpu s | peak MB | `hash` seconds | `hash` peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, station in enumerate(journey.stations):
        stops = [one.stops[number] for one in moved]
        figures = [
            f"{sum(stop.disk_bytes for stop in stops):,}",
            f"{sum(stop.converted.seconds for stop in stops):.1f}",
            f"{sum(stop.converted.cpu_seconds for stop in stops):.1f}",
            f"{max(stop.converted.peak_mb for stop in stops):.0f}",
            f"{sum(stop.hashed.seconds for stop in stops):.1f}",
            f"{max(stop.hashed.peak_mb for stop in stops):.0f}",
        ]
        words = " ".join([station.format, *stops[0].station.options])
        lines.append(f"| {number + 1}. `{words}` | {', '.join(station.carries)} | {' | '.join(figures)} |")
    made, equal = sum(one.made.seconds for one in moved), sum(int(one.equal) for one in moved)
    what = "tensors" if journey.equal == "safetensors" else "masters, states and steps, as DeepSpeed's ranks hold them,"
    truth = "as PEFT's `merge_and_unload` makes them" if journey.source == "lora" else "as in the source"
    lines += ["", f"Making the bytes took {made:.1f} s. At the end {equal:,} {what} were the same {truth}."]
    return lines


def _elements(tensors: Tensors) -> tuple[int, int]:
    """Return the number of elements, and of their bytes. A step is a number, not a tensor."""
    sizes = {"bfloat16": 2, "float32": 4, "number": 0}
    counts = [(prod(shape), sizes[dtype]) for dtype, shape, _ in tensors.values()]
    return sum(count for count, size in counts if size), sum(count * size for count, size in counts)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
