"""Checkpoints to be damaged: what frameworks wrote (`fixtures/`), and of formats without a fixture what ckpt writes."""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ckpt
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.testing.conformance import digests
from ckpt.testing.describing import Content, content

FIXTURES = Path(__file__).parents[2] / "fixtures"
WRITTEN_BY_FRAMEWORKS = (
    *("toy-zero0", "toy-zero1", "toy-zero2", "toy-zero3", "lora-zero3", "moe-zero3", "trainer-zero2", "dcp-fsdp2"),
    *("dcp-torch21-fsdp1", "dcp-torch23-fsdp1", "torchtitan-llama3-0.3", "megatron-dist-flattened", "megatron-fsdp"),
)
#: Of what, in which format, and with what layout.
WRITTEN_BY_CKPT = (
    ("trainer-zero2", "hf", Layout(max_shard_size=4096)),
    ("toy-zero2", "full", Layout()),
    ("toy-zero2", "universal", Layout()),
    ("trainer-zero2", "zero3", Layout(world_size=4)),
    ("lora-zero3", "peft", Layout()),
    ("megatron-dist-flattened", "megatron", Layout(tp=1, pp=2)),
    ("megatron-dist-flattened", "megatron-deepspeed", Layout(tp=1, pp=2, world_size=4)),
)
TARGETS = {
    "hf": Layout(names="own", max_shard_size=4096),
    "full": Layout(),
    "dcp": Layout(world_size=3),
    "universal": Layout(),
    "zero2": Layout(world_size=3),
    "zero3": Layout(world_size=3),
    "megatron": Layout(tp=1),
    "megatron-dist": Layout(),
    "megatron-deepspeed": Layout(tp=1, world_size=2),
    "peft": Layout(),
}
#: What stands beside a checkpoint and is carried as it is.
_CARRIED = re.compile(r"(\w*config|tokenizer\w*|trainer_state|special_\w+)\.json|rng_state\w*\.pth|.*\.(txt|md)")
_VITAL_TEXT = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")


@dataclass(frozen=True)
class Sample:
    """A checkpoint that is as it should be; `path` is its run folder."""

    name: str
    path: Path

    @property
    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file())

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to))


def write(path: Path, target: str, out: Path) -> None:
    """Convert to `target`, in its layout."""
    ckpt.plan(ckpt.open(path), target, TARGETS[target]).run(out, manifest=False)


def converted(path: Path, target: str, out: Path) -> dict[str, str]:
    """The digests of what a conversion writes."""
    write(path, target, out)
    return digests(out)


def make_samples(folder: Path) -> list[Sample]:
    samples = []
    for name in WRITTEN_BY_FRAMEWORKS:
        shutil.copytree(FIXTURES / name, folder / name, ignore=shutil.ignore_patterns("truth"))
        samples.append(Sample(name, folder / name))
    for name, format, layout in WRITTEN_BY_CKPT:
        path = folder / f"{name}-as-{format}"
        ckpt.plan(ckpt.open(folder / name), format, layout).run(path, manifest=False)
        samples.append(Sample(path.name, path))
    return samples


@cache
def intact(sample: Sample) -> dict[str, dict[str, str]]:
    """By target, the digests of what the sample becomes; targets that refuse it are left out."""
    found = {}
    for target in TARGETS:
        out = sample.path.parent / "intact"
        try:
            found[target] = converted(sample.path, target, out)
        except CkptError:
            continue
        finally:
            shutil.rmtree(out, ignore_errors=True)
    assert found, sample
    return found


@cache
def tensors(sample: Sample) -> Counter[Content]:
    return tensors_of(ckpt.open(sample.path))


def tensors_of(checkpoint: Checkpoint) -> Counter[Content]:
    """What the tensors of a checkpoint hold, by whatever names."""
    return Counter(content(tensor) for tensor in checkpoint.tensors.values())


def is_carried(name: str) -> bool:
    base = os.path.basename(name)
    return bool(_CARRIED.fullmatch(base)) and base not in _VITAL_TEXT


@cache
def data_ranges(path: Path) -> tuple[range, ...]:
    """The bytes of a file that are elements of tensors, found without ckpt's own readers: no checksum is looked at."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return (range(8 + int.from_bytes(content[:8], "little"), len(content)),)
    found = []
    for local in re.finditer(rb"PK\x03\x04", content):
        at = local.start()
        length, extra = struct.unpack_from("<HH", content, at + 26)
        name = content[at + 30 : at + 30 + length]
        listed = re.compile(rb"PK\x01\x02.{16}(.{4}).{22}" + re.escape(name), re.DOTALL).search(content, at)
        if b"/data/" in name and listed is not None:
            start = at + 30 + length + extra
            found.append(range(start, start + int.from_bytes(listed[1], "little")))
    return tuple(found)
