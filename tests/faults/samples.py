"""Checkpoints to damage: frameworks' own files (`fixtures/`), or ckpt's output for formats without a fixture."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import fsspec

import ckpt
from ckpt.commands.resume.resuming import RECORD
from ckpt.compare.manifest import MANIFEST
from ckpt.errors import CkptError, UsageError
from ckpt.plan.checkpoint import Checkpoint, Key, Layout
from ckpt.testing.conformance import digests
from ckpt.testing.described_tensors import Content, content
from tests.support.places import FIXTURES

WRITTEN_BY_FRAMEWORKS = (
    *("toy-zero0", "toy-zero1", "toy-zero2", "toy-zero3", "lora-zero3", "moe-zero3", "trainer-zero2", "dcp-fsdp2"),
    *("dcp-torch21-fsdp1", "dcp-torch23-fsdp1", "torchtitan-llama3-0.3", "megatron-dist-flattened", "megatron-fsdp"),
    *("experts-zero0", "experts-zero1", "experts-zero2"),
    *("toy-zero0-fp32", "autotp-zero1", "trainer-plain", "verl-fsdp1", "verl-fsdp2", "torchtitan-qwen3-moe"),
    *("quantized-dcp/ao8", "quantized-ranks/ao8", "quantized-zero2/bnb8", "quantized-zero3/ao8", "quantized-gathered"),
    *("trl-fsdp2/outputs/llama-sft", "trl-lora-zero3/outputs/qwen3-lora"),
)
#: Source, format and layout for each conversion.
WRITTEN_BY_CKPT = (
    ("trainer-zero2", "hf", Layout(max_shard_size=4096)),
    ("toy-zero2", "full", Layout()),
    ("toy-zero2", "universal", Layout()),
    ("trainer-zero2", "zero3", Layout(world_size=4)),
    ("lora-zero3", "peft", Layout()),
    ("megatron-dist-flattened", "megatron", Layout(tp=1, pp=2)),
    ("megatron-dist-flattened", "megatron-deepspeed", Layout(tp=1, pp=2, world_size=4)),
    ("toy-zero3", "fsdp-ranks", Layout(world_size=2)),
    ("verl-fsdp1", "fsdp-ranks", Layout(world_size=3)),
    ("toy-zero1", "dcp", Layout(world_size=2, flat_optimizer=True)),
)


class How(Enum):
    """Ways to obtain a conversion's output."""

    WRITTEN = "written"
    PLAIN = "written with plain values of quantized optimizer states"
    VIEWED = "read from views of its files"
    RESUMED = "written by ckpt.resume"
    FROM_A_STORE = "read from a store, and written"


@dataclass(frozen=True)
class Way:
    """Target format with a layout."""

    format: str
    layout: Layout
    how: How = How.WRITTEN


_HF = Layout(names="own", max_shard_size=4096)
_RANKS = Layout(world_size=3)
#: Target formats to try for each sample.
TARGETS = {
    "hf": Way("hf", _HF),
    "full": Way("full", Layout()),
    "dcp": Way("dcp", _RANKS),
    "dcp with a flat optimizer": Way("dcp", Layout(world_size=2, flat_optimizer=True)),
    "universal": Way("universal", Layout()),
    "zero1": Way("zero1", Layout(world_size=2)),
    "zero2": Way("zero2", _RANKS),
    "zero3": Way("zero3", _RANKS),
    "megatron": Way("megatron", Layout(tp=1)),
    "megatron-dist": Way("megatron-dist", Layout()),
    "megatron-deepspeed": Way("megatron-deepspeed", Layout(tp=1, world_size=2)),
    "fsdp-ranks": Way("fsdp-ranks", _RANKS),
    "trainer": Way("trainer", Layout()),
    "peft": Way("peft", Layout()),
    "zero2 with plain states": Way("zero2", _RANKS, How.PLAIN),
    "fsdp-ranks with plain states": Way("fsdp-ranks", _RANKS, How.PLAIN),
    "views of hf": Way("hf", _HF, How.VIEWED),
    "views of dcp": Way("dcp", _RANKS, How.VIEWED),
    "zero3 to resume from": Way("zero3", Layout(world_size=5), How.RESUMED),
    "dcp to resume from": Way("dcp", Layout(world_size=5), How.RESUMED),
    "hf from a store": Way("hf", _HF, How.FROM_A_STORE),
    "full from a store": Way("full", Layout(), How.FROM_A_STORE),
}
#: Companion files copied unchanged by a conversion.
_CARRIED = re.compile(r"(\w*config|tokenizer\w*|trainer_state|special_\w+)\.json|rng_state\w*\.pth|.*\.(txt|md)")
_NUMBERS = itertools.count()
_VITAL_TEXT = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")


@dataclass(frozen=True)
class Sample:
    """An intact checkpoint; `path` is its run folder."""

    name: str
    path: Path

    @property
    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file())

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to))


def write(path: Path, target: str, out: Path) -> None:
    """Convert to `target`."""
    way = TARGETS[target]
    checkpoint: Checkpoint = ckpt.open(_uploaded(path) if way.how is How.FROM_A_STORE else path)
    if way.how is How.PLAIN:
        checkpoint = checkpoint.with_plain_states()
    conversion = ckpt.plan(checkpoint, way.format, way.layout)
    if way.how is How.VIEWED:
        for name in conversion.files:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            with conversion.open(name) as view:
                (out / name).write_bytes(view.read())
    else:
        conversion.run(out, manifest=False)


def converted(path: Path, target: str, out: Path) -> dict[str, str]:
    """Convert and return the output's digests."""
    way = TARGETS[target]
    if way.how is not How.RESUMED:
        write(path, target, out)
        return digests(out)
    found = Path(ckpt.resume(path, format=way.format, world_size=way.layout.world_size, say=lambda _: None))
    if not found.is_relative_to(kept := path.with_name(f".{path.name}.ckpt-resume")):
        raise UsageError("it is loaded as it is", path=found)
    try:
        return {name: one for name, one in digests(found).items() if name not in (RECORD, MANIFEST)}
    finally:
        shutil.rmtree(kept)


def _uploaded(path: Path) -> str:
    """Copy the sample to a store and return its URL."""
    memory: dict[str, Any] = fsspec.filesystem("memory").store
    memory.clear()  # clear the previous case
    url = f"memory://case{next(_NUMBERS)}/{path.name}"
    fsspec.filesystem("memory").put(str(path), url, recursive=True)
    return url


def make_samples(folder: Path) -> list[Sample]:
    samples = []
    for name in WRITTEN_BY_FRAMEWORKS:
        path = folder / name.replace("/", "-")
        shutil.copytree(FIXTURES / name, path, ignore=shutil.ignore_patterns("truth"))
        samples.append(Sample(path.name, path))
    for name, format, layout in WRITTEN_BY_CKPT:
        path = folder / f"{name}-as-{format}"
        ckpt.plan(ckpt.open(folder / name), format, layout).run(path, manifest=False)
        samples.append(Sample(path.name, path))
    return samples


@cache
def truth(sample: Sample, target: str) -> dict[str, str] | None:
    """Return the digests of the intact sample's conversion, or None if the target refuses it."""
    out = sample.path.parent / "intact"
    try:
        return converted(sample.path, target, out)
    except CkptError:
        return None
    finally:
        shutil.rmtree(out, ignore_errors=True)


def some_target(sample: Sample, random: Random, hows: Container[How] = How) -> tuple[str, dict[str, str]]:
    """Return a target that accepts the sample, and its digests."""
    targets = [name for name, way in TARGETS.items() if way.how in hows]
    for target in random.sample(targets, k=len(targets)):
        if (found := truth(sample, target)) is not None:
            return target, found
    raise AssertionError(f"nothing takes {sample}")


@cache
def tensors(sample: Sample) -> Counter[Content]:
    return tensors_of(ckpt.open(sample.path))


def tensors_of(checkpoint: Checkpoint) -> Counter[Content]:
    """Count tensor contents under any names."""
    return Counter(contents(checkpoint).values())


def contents(checkpoint: Checkpoint) -> dict[Key, Content]:
    """Return tensor contents; for quantized tensors only the method."""
    quantized = checkpoint.quantized.methods
    return {
        key: (quantized[key], tensor.shape, b"") if key in quantized else content(tensor)
        for key, tensor in checkpoint.tensors.items()
    }


def is_carried(name: str) -> bool:
    base = os.path.basename(name)
    return bool(_CARRIED.fullmatch(base)) and base not in _VITAL_TEXT


def data_ranges(path: Path) -> tuple[range, ...]:
    """Return the byte ranges of tensor elements."""
    return tuple(_records(path))


def checked_ranges(path: Path) -> tuple[range, ...]:
    """Return the byte ranges of elements with a CRC. A CRC of 0 means none: torch can omit it."""
    return tuple(part for part, crc32 in _records(path).items() if crc32)


@cache
def _records(path: Path) -> dict[range, int]:
    """Find tensor elements and their recorded CRCs without ckpt's own readers."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return {range(8 + int.from_bytes(content[:8], "little"), len(content)): 0}
    found = {}
    for local in re.finditer(rb"PK\x03\x04", content):
        at = local.start()
        length, extra = struct.unpack_from("<HH", content, at + 26)
        name = content[at + 30 : at + 30 + length]
        listed = re.compile(rb"PK\x01\x02.{12}(.{4})(.{4}).{22}" + re.escape(name), re.DOTALL).search(content, at)
        if b"/data/" in name and listed is not None:
            start = at + 30 + length + extra
            crc32, size = (int.from_bytes(one, "little") for one in listed.groups())
            found[range(start, start + size)] = crc32
    return found
