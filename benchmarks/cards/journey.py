"""Journeys of a model through the formats, with digests at every station.

The digests are compared with the generator's (`source`), and the last checkpoint with the first by torch and
safetensors alone (`benchmarks.equal`). Any difference raises `DifferentError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from benchmarks.cards.lora import ADAPTER, MERGED, Lora
from benchmarks.cards.windows import Shape, Window, num_layers
from benchmarks.measure import CKPT, PYTHON, Run, call, remove, timed

WEIGHTS, MASTERS, OPTIMIZER = "weights", "masters", "optimizer"
ALL = (WEIGHTS, MASTERS, OPTIMIZER)
#: Bytes per element on disk at most: the source, and two stations.
DISK_BYTES = {"hf": 2 + 4 + 4, "zero3": 12 + 16 + 16, "lora": 2 + 2 + 4 + 4, "peft": 2 + 4 + 4}
MERGE = "merge-lora"

#: Kind, name and role.
Key = tuple[str, str, str]
#: Dtype, shape and digest.
Value = tuple[str, Shape, str]
Tensors = dict[Key, Value]


class DifferentError(Exception):
    """Tensors at a station differ from the source."""


@dataclass(frozen=True)
class Sizes:
    """Megatron's parallel sizes. `options` are further options of `ckpt convert`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    options: tuple[str, ...] = ()

    def fitted(self, config: Mapping[str, Any], window: Window) -> Sizes:
        """Return sizes that divide a window's layers and experts."""
        layers = window.stop - window.start
        if layers == num_layers(config) and not window.cut:
            return self
        pp, ep = gcd(self.pp, layers), gcd(self.ep, window.experts or self.ep)
        vpp = gcd(self.vpp, layers // pp) if pp > 1 else 1
        whole = (pp, vpp) == (self.pp, self.vpp)
        return Sizes(self.tp, pp, ep, self.etp, vpp, self.options if whole else ())

    def words(self) -> list[str]:
        """Return `ckpt convert`'s options. Each is given, because the source's own is the default."""
        sizes = {"--tp": self.tp, "--pp": self.pp, "--vpp": self.vpp, "--ep": self.ep, "--etp": self.etp}
        found = [(name, str(size)) for name, size in sizes.items() if size is not None]
        return [*(word for pair in found for word in pair), *self.options]


@dataclass(frozen=True)
class Station:
    """A format, its options, and the kinds of tensors it carries."""

    format: str
    options: tuple[str, ...] = ()
    carries: tuple[str, ...] = ALL


@dataclass(frozen=True)
class Journey:
    """A source, its stations, and the kind for `benchmarks.equal`.

    `lora` is an adapter: "peft" moves it, "lora" its merge, and PEFT's own merge is the truth.
    """

    title: str
    source: str
    stations: tuple[Station, ...]
    equal: str
    lora: Lora | None = None

    def held(self, shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the weights that stations hold, for a model's."""
        return self.lora.factors(shapes) if self.lora and self.source == "peft" else shapes


@dataclass(frozen=True)
class Stop:
    """A station's command and figures."""

    station: Station
    command: tuple[str, ...]
    converted: Run
    hashed: Run
    disk_bytes: int


@dataclass(frozen=True)
class Moved:
    """Tensors by their names in the whole model, and the output of `benchmarks.equal`."""

    window: Window
    made: Run
    tensors: Tensors
    stops: tuple[Stop, ...]
    equal: str


def journeys(trained: Sizes, other: Sizes, ranks: tuple[int, int], lora: Lora | None = None) -> tuple[Journey, Journey]:
    first, second = (("--world-size", str(number)) for number in ranks)
    bf16 = ("--dtype", "bf16")

    def stations(*kinds: str) -> tuple[Station, ...]:
        return (
            Station("megatron-dist", tuple(trained.words()), kinds),
            Station("megatron-dist", tuple(other.words()), kinds),
            Station("zero3", first, kinds),
            Station("zero3", second, kinds),
            Station("dcp", (), tuple(kind for kind in kinds if kind != MASTERS)),
        )

    weights = (*stations(WEIGHTS), Station("hf", bf16, (WEIGHTS,)))
    if lora is not None:
        merged = (Station(MERGE, (), (WEIGHTS,)), *weights)
        moved = (Station("megatron-dist", ("--tp", "2"), (WEIGHTS,)), Station("peft", (), (WEIGHTS,)))
        return (
            Journey("Merged weights", "lora", merged, "safetensors", lora),
            Journey("Adapter", "peft", moved, "safetensors", lora),
        )
    training = (*stations(*ALL), Station("zero3", first))
    return (
        Journey("Weights", "hf", weights, "safetensors"),
        Journey("Masters and Adam's states", "zero3", training, "zero3"),
    )


def travel(journey: Journey, config: Mapping[str, Any], window: Window, folder: Path, ranks: int) -> Moved:
    """Move a window through all stations. At most the source and two stations are on disk."""
    remove([folder])
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(window.config(config), indent=2))
    first = truth = source
    if journey.lora is not None:
        first = folder / ADAPTER
        truth = folder / MERGED if journey.source == "lora" else first
        first.mkdir()
        (first / "adapter_config.json").write_text(json.dumps(journey.lora.config(), indent=2))
    making = [PYTHON, "-m", "benchmarks.cards.source", journey.source, source, str(window.start), str(ranks)]
    made, output = timed("making the source", making)
    expected = {
        (kind, name, role): (dtype, tuple(shape), content)
        for kind, name, role, dtype, shape, content in json.loads(output.strip().rpartition("\n")[2])
    }
    dtype = "fp32" if journey.source == "peft" else "bf16"
    _, reference = hashes(truth, source, ALL if journey.source == "zero3" else (WEIGHTS,), dtype)
    check("the source", reference, digested(expected))
    stops, at, held = [], first, journey.source
    for number, station in enumerate(journey.stations, 1):
        output_folder = folder / f"{number}-{station.format}"
        is_merge = station.format == MERGE
        words = [MERGE, str(at), "--base", str(source)] if is_merge else ["convert", held, station.format, str(at)]
        is_known = is_merge or (at, held) == (source, "hf")
        options = [*station.options, *(() if is_known else ("--config", str(source)))]
        command = [*words, "-o", str(output_folder), *options]
        converted, _ = timed(f"ckpt {' '.join(command)}", [*CKPT, *command, "-q"])
        hashed, found = hashes(output_folder, source, station.carries, dtype)
        wanted = {key: one for key, one in reference.items() if key[0] in station.carries}
        check(f"station {number}, {station.format} {' '.join(station.options)}", found, wanted)
        shown = tuple(word.replace(f"{folder}/", "") for word in command)
        stops.append(Stop(station, ("ckpt", *shown), converted, hashed, disk_bytes(output_folder)))
        if at != first:
            remove([at])
        at, held = output_folder, "hf" if is_merge else station.format
    equal = call("benchmarks.equal", journey.equal, *(step_folder(one) for one in (at, truth)))
    remove([folder])
    tensors = {(kind, window.name(name), role): value for (kind, name, role), value in expected.items()}
    return Moved(window, made, tensors, tuple(stops), equal)


def hashes(path: Path, config: Path, kinds: Sequence[str], dtype: str = "bf16") -> tuple[Run, Tensors]:
    """Return the output of `ckpt hash`. Masters without weights count as weights in bf16."""
    run, output = timed(
        f"ckpt hash {path}", [*CKPT, "hash", path, "--config", config, "--dtype", dtype, "--json", "-q"]
    )
    found = {
        (one["kind"], one["fqn"], one["role"]): (one["dtype"], tuple(one["shape"]), one["digest"])
        for one in json.loads(output)["tensors"]
        if one["kind"] in kinds
    }
    return run, found


def check(where: str, found: Tensors, expected: Tensors) -> None:
    if found == expected:
        return
    differing = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    shown = [f"{' '.join(key)}: expected {expected.get(key)}, found {found.get(key)}" for key in differing[:5]]
    raise DifferentError(f"{where}: {len(differing)} tensors differ\n" + "\n".join(shown))


def digested(tensors: Tensors) -> Tensors:
    """Return the digests by the documented rule of `ckpt hash`, from the digests of the elements."""
    return {
        (kind, name, role): (dtype, shape, _digest((name, role, dtype, ",".join(map(str, shape)), ""), content))
        for (kind, name, role), (dtype, shape, content) in tensors.items()
    }


def _digest(words: Sequence[str], content: str) -> str:
    return xxh3_128("\0".join(words).encode() + bytes.fromhex(content)).hexdigest()


def together(moved: Sequence[Moved]) -> Iterator[tuple[str, str, Tensors]]:
    """Yield each kind's digest of the whole model.

    Raise DifferentError if two windows held different bits under one name.
    """
    whole: Tensors = {}
    for one in moved:
        for key, value in one.tensors.items():
            if whole.setdefault(key, value) != value:
                raise DifferentError(f"{' '.join(key)} differs between windows")
    for kind in ALL:
        if of_kind := {key: one for key, one in digested(whole).items() if key[0] == kind}:
            lines = sorted(f"{value[2]} {role} {name}\n" for (_, name, role), value in of_kind.items())
            yield kind, xxh3_128("".join(lines).encode()).hexdigest(), of_kind


def step_folder(path: Path) -> Path:
    return next(path.glob("global_step*"), path)


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def most_elements(journey: Journey, disk: int) -> int:
    return disk // DISK_BYTES[journey.source]
