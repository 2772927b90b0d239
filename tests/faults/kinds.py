"""Kinds of damage. Each yields endless random cases for a sample."""

from __future__ import annotations

import itertools
import os
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import ckpt
from tests.faults.samples import Sample, data_ranges, is_carried
from tests.support.hostile import make as hostile

#: Damaged content that the files may not reveal. `tests/faults/excuses.py` decides if they truly don't.
IN_DATA, CARRIED, MISSING, VALUE = (
    "elements",
    "a file next to the checkpoint",
    "a file that no other one names",
    "a value",
)
EXCHANGED, COPIED = "two files that record no name of their own", "one file copied over another"


@dataclass(frozen=True)
class Case:
    """Damage to a copy of a sample.

    `hidden`: why nothing can reveal it; `is_unchecked`: no checksum; `is_stray`: an extra file.
    """

    what: str
    do: Callable[[Path], None]
    hidden: str | None = None
    is_unchecked: bool = False
    is_stray: bool = False


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        (run / name).write_bytes(content)

    return do


def _changed(name: str, content: bytes, what: str, hidden: str | None) -> Case:
    return Case(f"{name}: {what}", _write(name, content), hidden, name.endswith((".metadata", ".safetensors")))


def _hidden(sample: Sample, name: str, start: int, stop: int) -> str | None:
    if is_carried(name):
        return CARRIED
    ranges = data_ranges(sample.path / name)
    return IN_DATA if any(part.start < stop and start < part.stop for part in ranges) else None


def _content(sample: Sample, random: Random) -> tuple[str, bytes]:
    name = random.choice([name for name in sample.files if (sample.path / name).stat().st_size])
    return name, (sample.path / name).read_bytes()


def flips(sample: Sample, random: Random) -> Iterator[Case]:
    """Flip one bit, nine times in ten outside tensor elements, because elements fill most of every file."""
    while True:
        name, content = _content(sample, random)
        at = random.randrange(len(content))
        if random.random() < 0.9 and _hidden(sample, name, at, at + 1) == IN_DATA:
            continue
        changed = bytearray(content)
        changed[at] ^= 1 << random.randrange(8)
        what = f"bit of byte {at} of {len(content)}"
        yield _changed(name, bytes(changed), what, _hidden(sample, name, at, at + 1))


def zeroed(sample: Sample, random: Random) -> Iterator[Case]:
    while True:
        name, content = _content(sample, random)
        start = random.randrange(len(content))
        stop = min(len(content), start + random.choice((1, 8, 64, 512, 4096)))
        changed = content[:start] + bytes(stop - start) + content[stop:]
        if changed != content:
            yield _changed(name, changed, f"bytes {start} to {stop}", _hidden(sample, name, start, stop))


def truncations(sample: Sample, random: Random) -> Iterator[Case]:
    while True:
        name, content = _content(sample, random)
        length = random.choice((0, len(content) - 1, len(content) // 2, random.randrange(len(content))))
        hidden = CARRIED if is_carried(name) else None
        yield Case(f"{name}: {length} of {len(content)} bytes", _write(name, content[:length]), hidden)


def nasty_values(sample: Sample, random: Random) -> Iterator[Case]:
    """Replace a number or text in a pickle, keep its length and correct the checksums."""
    names = [name for name in sample.files if Path(name).suffix in (".pt", ".bin", ".distcp", "") and name != "latest"]
    while names:
        name = random.choice(names)
        content = (sample.path / name).read_bytes()
        records = pickles_in(content)
        values = [(r, at, size, kind) for r in records for at, size, kind in _values(content[r.start : r.stop])]
        if not values:
            names.remove(name)
            continue
        record, at, size, kind = random.choice(values)
        new = {
            "int": random.choice(
                (b"\xff" * size, b"\0" * size, b"\xff" * (size - 1) + b"\x7f", random.randbytes(size))
            ),
            "float": struct.pack(">d", random.choice((float("nan"), float("inf"), -1e308, 0.0))),
            "text": (random.choice(("../", "\x1b[31m", "\n\0", "x")) * size).encode()[:size],
        }[kind]
        start = record.start + at
        changed = content[:start] + new + content[start + size :]
        old, crc = (zlib.crc32(one[record.start : record.stop]) for one in (content, changed))
        changed = changed[: record.stop] + changed[record.stop :].replace(
            struct.pack("<I", old), struct.pack("<I", crc)
        )
        if changed != content:
            yield Case(f"{name}: {kind} of {size} bytes at {start}", _write(name, changed), VALUE)


def pickles_in(content: bytes) -> list[range]:
    """Return the byte ranges of pickles: records `data.pkl` in torch archives, or the whole file."""
    if content[:1] == b"\x80":
        return [range(len(content))]
    found = []
    for match in re.finditer(rb"PK\x03\x04", content):
        at = match.start()
        length, extra = (int.from_bytes(content[at + n : at + n + 2], "little") for n in (26, 28))
        start = at + 30 + length + extra
        if content[at + 30 : at + 30 + length].endswith(b"data.pkl"):
            found.append(range(start, content.find(b"PK\x07\x08", start)))
    return found


_KINDS = {"BININT": ("int", 1, 4), "BININT1": ("int", 1, 1), "BININT2": ("int", 1, 2), "BINFLOAT": ("float", 1, 8)}
_TEXTS = {"BINUNICODE": 5, "SHORT_BINUNICODE": 2}


def _values(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield position, length and kind of each value in a pickle."""
    for opcode, argument, at in pickletools.genops(data):
        assert at is not None
        if opcode.name in _KINDS:
            kind, skip, size = _KINDS[opcode.name]
            yield at + skip, size, kind
        elif opcode.name in _TEXTS and isinstance(argument, str) and argument:
            yield at + _TEXTS[opcode.name], len(argument.encode()), "text"


def hostile_files(sample: Sample, random: Random) -> Iterator[Case]:
    """Replace a file, or the pickle in an archive, by a hostile pickle or archive."""
    names = [n for n in sample.files if Path(n).suffix in (".pt", ".bin", ".distcp") or n.endswith(".metadata")]
    pickles = [(name, case.content) for name, case in hostile.PICKLES.items() if len(case.content) < 1 << 17]
    archives = [(name, case.content) for name, case in hostile.ARCHIVES.items() if len(case.content) < 1 << 17]
    while names:
        name = random.choice(names)
        idea, content = random.choice(pickles if name.endswith(".metadata") else pickles + archives)
        if (idea, content) in pickles and not name.endswith(".metadata"):
            content = hostile.archive(hostile.records(content))
        yield Case(f"{name}: {idea}", _write(name, content))


def swaps(sample: Sample, random: Random) -> Iterator[Case]:
    """Exchange two files with the same kind, or copy one over the other."""
    groups: dict[str, list[str]] = {}
    for name in sample.files:
        groups.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    pairs = [pair for group in groups.values() for pair in itertools.permutations(group, 2)]
    contents = {name: (sample.path / name).read_bytes() for pair in pairs for name in pair}
    pairs = [(a, b) for a, b in pairs if contents[a] != contents[b]]
    while pairs:
        a, b = random.choice(pairs)
        exchanged = random.random() < 0.5

        def do(run: Path, a: str = a, b: str = b, exchanged: bool = exchanged) -> None:
            (run / a).write_bytes(contents[b])
            if exchanged:
                (run / b).write_bytes(contents[a])

        hidden = COPIED if not exchanged else EXCHANGED if _record_alike(contents[a], contents[b]) else None
        what = f"{b} {'exchanged with' if exchanged else 'copied over'} it"
        yield Case(f"{a}: {what}", do, CARRIED if is_carried(a) else hidden)


def _record_alike(one: bytes, other: bytes) -> bool:
    """Return True if both files record the same name, or no name.

    A torch archive records its file's name as a folder.
    """
    return _recorded_name(one) == _recorded_name(other)


def _recorded_name(content: bytes) -> bytes | None:
    found = re.match(rb"PK\x03\x04.{26}([^/]*)/", content, re.DOTALL)
    return found and found[1]


IN_ITS_PLACE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link out of the folder": lambda path: path.symlink_to("/etc/hostname"),
    "an empty file": lambda path: path.touch(),
}


#: Files that no other file names. `training_args.bin` only sets the compute dtype.
_NAMED_NOWHERE = ("optimizer.bin", "training_state.pt", "optimizer.pt", "scheduler.pt", "training_args.bin")


def in_its_place(sample: Sample, random: Random) -> Iterator[Case]:
    """Delete a file, or replace it by something else."""
    while True:
        name, what = random.choice(sample.files), random.choice(list(IN_ITS_PLACE))

        def do(run: Path, name: str = name, what: str = what) -> None:
            (run / name).unlink()
            IN_ITS_PLACE[what](run / name)

        is_missing = what == "nothing" and os.path.basename(name) in _NAMED_NOWHERE
        missing = MISSING if is_missing else None
        yield Case(f"{name}: {what}", do, CARRIED if is_carried(name) else missing)


_STRAYS = (
    *("layer_wise_optimizer_0.pt", "optimizer_rank_97.bin", "extra.pt", "best.pth"),
    *("ema.safetensors", "__97_0.distcp"),
)


def strays(sample: Sample, random: Random) -> Iterator[Case]:
    """Add a file to a folder that is read: another file's name or number, with bytes from the same sample."""
    checkpoint = ckpt.open(sample.path)
    own = [Path(file.path) for file in checkpoint.files]
    own = [
        file for file in own if file.name != ".metadata" and Path(checkpoint.path) in (file.parent, file.parent.parent)
    ]
    own = [file for file in own if file.suffix not in (".pt", ".bin") or b"/data/" in file.read_bytes()]  # has tensors
    while own:
        file = random.choice(own)
        numbered = re.sub(r"\d+(?=\D*$)", lambda found: "97".zfill(len(found[0])), file.name)
        place = file.parent / (numbered if random.random() < 0.4 else random.choice(_STRAYS))
        if not os.path.lexists(place):
            name = str(place.relative_to(sample.path))
            yield Case(f"{name}: a copy of {file.name}", _write(name, file.read_bytes()), is_stray=True)


#: Kinds of damage to files, and each kind's share in the campaign.
KINDS: dict[str, tuple[Callable[[Sample, Random], Iterator[Case]], float]] = {
    "one bit flipped": (flips, 0.35),
    "a range zeroed": (zeroed, 0.12),
    "cut off": (truncations, 0.08),
    "a nasty value": (nasty_values, 0.13),
    "a hostile file": (hostile_files, 0.08),
    "files swapped": (swaps, 0.03),
    "something else in its place": (in_its_place, 0.04),
    "a stray file": (strays, 0.02),
}
