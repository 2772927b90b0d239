"""Damage to ckpt's own records: a stopped conversion's journals and files, and kept conversions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import ckpt
from ckpt.commands.resume.resuming import RECORD
from ckpt.compare.manifest import MANIFEST
from ckpt.errors import CkptError
from ckpt.move.files import staging_folder
from ckpt.move.journal import JOURNAL
from ckpt.testing.conformance import digests
from tests.faults.kinds import IN_ITS_PLACE
from tests.faults.running import Ending
from tests.faults.samples import TARGETS, How, Sample, some_target, truth, write
from tests.support.killing import killed_before_call

_OURS = (JOURNAL, RECORD, MANIFEST)


def stopped(sample: Sample, folder: Path, random: Random) -> Iterator[tuple[str, Ending]]:
    """Kill a conversion, damage its leftovers and run it again."""
    while True:
        target, expected = some_target(sample, random, {How.WRITTEN})
        out = folder / "out"
        write_it = partial(write, sample.path, target, out)
        what = f"{sample.name} to {target}"
        if killed_before_call(random.randint(10, 80), write_it) and not out.exists():
            what += f": {_damaged(staging_folder(out), random)}"
        else:  # it ended before the kill
            shutil.rmtree(out)
        ending = _ending(write_it, out, expected)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield what, ending


def kept(sample: Sample, folder: Path, random: Random) -> Iterator[tuple[str, Ending]]:
    """Damage a conversion kept by `ckpt.resume`: resume must refuse it, or its bits must be right."""
    while any(way.how is How.RESUMED and truth(sample, name) is not None for name, way in TARGETS.items()):
        target, expected = some_target(sample, random, {How.RESUMED})
        way = TARGETS[target]
        run = sample.copy(folder / sample.path.name)
        resume = partial(ckpt.resume, run, format=way.format, world_size=way.layout.world_size, say=lambda _: None)
        place = Path(resume())
        what = f"{sample.name} to {target}: {_damaged(place, random)}"
        ending = _ending(resume, place, expected)
        for path in folder.iterdir():
            shutil.rmtree(path)
        yield what, ending


def _damaged(folder: Path, random: Random) -> str:
    """Damage a file in `folder`, half the time one of ckpt's own. Return a description."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        return "nothing is there yet"
    ours = [path for path in files if path.name.startswith(_OURS)]
    path = random.choice(ours if ours and random.random() < 0.5 else files)
    name, content = path.name, path.read_bytes()
    if random.random() < 0.3 or not content:
        form = random.choice(list(IN_ITS_PLACE))
        path.unlink()
        IN_ITS_PLACE[form](path)
        return f"{name}: {form}"
    at = random.randrange(len(content))
    changed = bytearray(content[:at] if random.random() < 0.2 else content)
    if at < len(changed):
        changed[at] ^= 1 << random.randrange(8)
    path.write_bytes(changed)
    return f"{name}: byte {at} of {len(content)}{'' if at < len(changed) else ', cut off'}"


def _ending(action: Callable[[], object], out: Path, expected: dict[str, str]) -> Ending:
    refused = None
    try:
        action()
    except CkptError as error:
        refused = error
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"
    if refused is None:
        found = {name: one for name, one in digests(out).items() if name not in _OURS}
        return "equal to the truth", None if found == expected else "something else is written, and nothing said"
    if refused.exit_code not in (2, 4, 5, 7):
        return "", f"exit code {refused.exit_code}: {refused.what}"
    if refused.exit_code in (2, 4) and not refused.hint:
        return "", f"no hint how to go on: {refused.what}"
    return f"refused with {refused.exit_code}", None
