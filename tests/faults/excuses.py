"""Differences without any trace on the disk: an excuse is granted only if nothing can reveal the difference."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import ckpt
from ckpt.compare.compare import check_masters
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Checkpoint
from ckpt.testing.described_tensors import Content
from tests.faults.kinds import CARRIED, EXCHANGED, IN_DATA, MISSING, VALUE, Case
from tests.faults.samples import Sample, checked_ranges, contents, data_ranges

BARE = "elements of a tensor in a file without checksums of them"
CHECKED = "elements of a tensor: `ckpt check --bytes` finds it"
AS_IT_IS = "a file next to the checkpoint, carried as it is"
UNREAD = "bytes of a carried torch file outside its pickle and its tensors, which `torch.load` does not read"
CONFIG = "an entry of config.json, which decides about other files"
NAME = "the name of a tensor in .metadata or in a header of safetensors, which have no checksum"
BESIDE = "a value that no tensor depends on, with its checksum"
RENAMED = "the name of a tensor, with its checksum"
DESCRIBED = "the shape, dtype or place of a tensor, with its checksum"
LOST = "a file is missing that no other one names: the optimizer's or the training state's, beside a model"
SAME_SIZES = "exchanged files that record no name, with tensors of the same sizes"
BY_CHECK = "exchanged files that record no name: `ckpt convert --check` finds it"

Contents = Mapping[tuple[str, str], Content]


def excuse(sample: Sample, run: Path, case: Case, found: dict[str, str], truth: dict[str, str]) -> str | None:
    """Return why nothing reveals that `found` differs from the truth, or None if `ckpt` missed something."""
    name = case.what.partition(":")[0]
    differing = {one for one in found.keys() | truth.keys() if found.get(one) != truth.get(one)}
    checkpoint = ckpt.open(run)
    there, expected = contents(checkpoint), contents(ckpt.open(sample.path))
    if {found.get(one) for one in differing} <= _carried(run / name, checkpoint):
        return AS_IT_IS
    if {found.get(one) for one in differing} <= _copy(run / name, sample.path / name):
        return UNREAD
    if case.hidden == CARRIED:
        return CONFIG if os.path.basename(name) == "config.json" else None
    if case.hidden == IN_DATA and _described(there) == _described(expected):
        if not ckpt.check(run, every_byte=True).whole:
            return CHECKED
        file = sample.path / name
        return BARE if len(checked_ranges(file)) < len(data_ranges(file)) else None
    if case.is_unchecked and Counter(there.values()) == Counter(expected.values()):
        return NAME
    if case.hidden == VALUE:
        if there == expected:
            return BESIDE
        return RENAMED if Counter(there.values()) == Counter(expected.values()) else DESCRIBED
    if case.hidden == MISSING:
        lost = expected.keys() - there.keys()
        return LOST if there.items() <= expected.items() and all(role != "weight" for _, role in lost) else None
    if case.hidden == EXCHANGED and _described(there) == _described(expected):
        return _exchanged(checkpoint, there, expected)
    return None


def _carried(damaged: Path, checkpoint: Checkpoint) -> set[str | None]:
    """Return digests of the damaged file and its unread neighbours, under any name.

    The set contains None if the file is gone.
    """
    opened = {file.path for file in checkpoint.files}
    own = [path for path in damaged.parent.iterdir() if path.is_file() and str(path) not in opened]
    gone: set[str | None] = set() if damaged.is_file() else {None}
    return gone | {hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def _copy(damaged: Path, intact: Path) -> set[str | None]:
    """Return the digest of a damaged torch file if torch loads it like the intact one, else nothing."""
    records = _records(intact)
    return {hashlib.sha256(damaged.read_bytes()).hexdigest()} if records and records == _records(damaged) else set()


def _records(file: Path) -> dict[str, bytes]:
    """Return the records `torch.load` reads from a torch file: its pickle and its tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist() if re.search(r"/data(\.pkl|/\d+)$", name)}
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return {}


def _described(tensors: Contents) -> dict[tuple[str, str], tuple[str, tuple[int, ...]]]:
    return {key: (dtype, shape) for key, (dtype, shape, _) in tensors.items()}


def _exchanged(checkpoint: Checkpoint, there: Contents, expected: Contents) -> str | None:
    """Return the excuse for exchanged files, or None if masters contradict weights and `--check` does not report it."""
    changed = {key for key in there if there[key] != expected[key]}
    weights = {(fqn, "weight") for fqn, role in changed if role == "master"}
    contradicted = {key for key in weights & there.keys() if key not in changed}
    try:
        check_masters(checkpoint)
    except CkptError:
        return BY_CHECK
    return None if contradicted else SAME_SIZES
