"""Sentences printed by `check --bytes`, `hash`, `diff`, `convert --verify` and `clean`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import ckpt
from ckpt.api import Conversion
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Layout
from tests.faults.claims import TORN, Lie, Maker
from tests.faults.comparisons import FILES, other_bits
from tests.faults.samples import Sample, checked_ranges

BYTES, SAME_DIGEST, NO_CHANGE, VERIFIED, REMOVES = (
    "as their checksums say",
    "the same digest",
    "0 tensors changed",
    "verified",
    "may be removed",
)
_FORMATS = ("hf", "full", "dcp", "zero3", "universal", "fsdp-ranks", "trainer")


# -- the claim about checksums -----------------------------------------------------------------------------------------
#: Changes to a few element bytes in a torch archive.
_PARTS: dict[str, Callable[[bytes], bytes]] = {
    "lowest bit": lambda part: bytes([part[0] ^ 1, *part[1:]]),
    "highest bit": lambda part: bytes([*part[:-1], part[-1] ^ 0x80]),
    "all bits": lambda part: bytes(byte ^ 0xFF for byte in part),
    "zeros": lambda part: bytes(len(part)),
    "two bytes exchanged": lambda part: part[1:2] + part[:1] + part[2:],
    "shifted by a byte": lambda part: part[1:] + part[:1],
}


def changed_elements(sample: Sample, random: Random) -> Lie | None:
    """Change the bits of some elements in a torch archive with CRCs."""
    names = [name for name in sample.files if not name.endswith(".safetensors") and checked_ranges(sample.path / name)]
    names = [name for name in names if _is_read(sample, name)]
    if not names:
        return None
    name, kind = random.choice(names), random.choice([*_PARTS])
    record = random.choice(checked_ranges(sample.path / name))
    content = (sample.path / name).read_bytes()
    at = random.randrange(record.start, max(record.start + 1, record.stop - 16))
    part = content[at : min(at + 16, record.stop)]
    changed = _PARTS[kind](part)
    if changed == part:
        return None

    def do(run: Path) -> None:
        (run / name).write_bytes(content[:at] + changed + content[at + len(part) :])

    def read(run: Path) -> Iterator[tuple[str, str]]:
        try:
            report = ckpt.check(run, every_byte=True)
        except CkptError:
            return
        if report.whole:
            yield BYTES, str(report)

    return Lie(f"{name}: {kind} at {at}", do, (BYTES,), kind=kind, claims=read, truth=lambda run: None)


def _is_read(sample: Sample, name: str) -> bool:
    return str(sample.path / name) in {file.path for file in ckpt.open(sample.path).files}


# -- the same digest, 0 tensors changed --------------------------------------------------------------------------------
def other_digests(sample: Sample, random: Random) -> Lie | None:
    """Change one element's bits: `hash` must print another digest, and `diff` must count a change."""
    lie = other_bits(sample, random)
    if lie is None:
        return None

    def asked(run: Path) -> Iterator[tuple[str, str]]:
        try:
            one, other = ckpt.hash(sample.path), ckpt.hash(run)
            if one.whole == other.whole:
                yield SAME_DIGEST, "\n".join([*other.lines(), *other.not_hashed])
            found = ckpt.diff(sample.path, run)
            if not found.changed and found.equal:
                yield NO_CHANGE, found.outcome
        except CkptError:
            pass

    return replace(lie, false=(SAME_DIGEST, NO_CHANGE), claims=asked, unless="not in the digests")


# -- verified ----------------------------------------------------------------------------------------------------------
def faulty_disks(sample: Sample, random: Random) -> Lie | None:
    """Let the disk store different bytes before `convert --verify` reads them back."""
    target, kind, seed = random.choice(_FORMATS), random.choice([*FILES]), random.randrange(1 << 30)
    try:
        conversion = ckpt.plan(sample.path, target, Layout())
    except CkptError:
        return None
    verify = Conversion._check_written
    chosen: list[str] = []

    def spoiled(conversion: Conversion, phase: Callable[[str, int], None], folder: Path, *rest: object) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
        file = Random(seed).choice([path for path in files if not path.name.startswith(".")])
        chosen.append(file.name)
        FILES[kind](file, Random(seed))
        verify(conversion, phase, folder, *rest)  # type: ignore[arg-type]

    def write(run: Path, is_spoiled: bool) -> Iterator[tuple[str, str]]:
        out = run.with_name("written")
        try:
            with mock.patch.object(Conversion, "_check_written", spoiled if is_spoiled else verify):
                conversion.run(out, verify=True, manifest=False)
        except CkptError:
            return
        finally:
            shutil.rmtree(out, ignore_errors=True)
        yield VERIFIED, f"{kind}: {chosen}"

    def asked(run: Path) -> Iterator[tuple[str, str]]:
        yield from write(run, is_spoiled=(run / "a lie").exists())

    return Lie(
        f"as {target}: {kind}",
        lambda run: (run / "a lie").touch(),
        (VERIFIED,),
        kind=kind,
        claims=asked,
        truth=lambda run: None,
        format=target,
        about=target,
    )


# -- may be removed ----------------------------------------------------------------------------------------------------
def only_copies(sample: Sample, random: Random) -> Lie | None:
    """Convert two steps. The older conversion stays if its step, itself, or the newer one is damaged."""
    steps = sorted(path.name for path in sample.path.glob("checkpoint-*"))
    if len(steps) < 2:
        return None
    whose = random.choice(("the step", "the older conversion", "the newer conversion"))
    kind = random.choice([*TORN])
    seed = random.randrange(1 << 30)

    def convert(run: Path) -> None:
        for step in steps:
            ckpt.convert(run / step, "hf", run.with_name(f"{run.name}-{step}-hf"))

    def do(run: Path) -> None:
        convert(run)
        older, newer = (run.with_name(f"{run.name}-{step}-hf") for step in (steps[0], steps[-1]))
        place = {"the step": run / steps[0], "the older conversion": older, "the newer conversion": newer}[whose]
        files = [path for path in sorted(place.rglob("*")) if path.suffix in (".pt", ".safetensors")]
        file = Random(seed).choice([path for path in files if not path.name.startswith("rng")])
        TORN[kind](file)

    def listed(run: Path) -> Iterator[tuple[str, str]]:
        for one in ckpt.clean(run).removable:
            if one.path.endswith(f"-{steps[0]}-hf"):
                yield REMOVES, one.why

    what = f"{kind}, of a file of {whose}"
    return Lie(what, do, (REMOVES,), kind=what, claims=listed, truth=convert)


#: Each class of lies and its share in the campaign.
CLASSES: dict[str, tuple[Maker, float]] = {
    "changed elements": (changed_elements, 0.03),
    "other digests": (other_digests, 0.03),
    "disks that change what is written": (faulty_disks, 0.03),
    "only copies": (only_copies, 0.01),
}
