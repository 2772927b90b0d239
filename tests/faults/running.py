"""Conversions with kills, failing system calls or senseless arguments."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from ckpt.errors import CkptError
from ckpt.testing.conformance import digests
from tests.faults.samples import How, Sample, some_target, write
from tests.support.commands import ckpt as run_ckpt
from tests.support.killing import CALLS, failing_at_call, killed_before_call

_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.ESTALE)
#: Calls needed to clean up.
_CLEARING = {"unlink", "rmdir", "scandir", "rename", "open"}
#: A case's ending: its class, and an error message or None.
Ending = tuple[str, str | None]
#: Class prefix for wrong endings without a trace on the disk.
EXCUSED = "excused"


def _left(out: Path, truth: dict[str, str]) -> str | None:
    """Return the fault in a failed conversion's leftovers, or None."""
    if out.exists() and digests(out) != truth:
        return "what was half written is visible"
    return None


def kills(sample: Sample, folder: Path, random: Random, most: int) -> Iterator[tuple[str, Ending]]:
    """Kill a conversion before a system call and run it again."""
    target, truth = some_target(sample, random, {How.WRITTEN})
    for number in random.sample(range(1, 60), k=min(most, 59)):
        out = folder / "out"
        what = f"{sample.name} to {target}: call {number}"
        was_killed = killed_before_call(number, partial(write, sample.path, target, out))
        wrong = _left(out, truth)
        if out.exists():
            shutil.rmtree(out)
        if wrong is None and was_killed:
            write(sample.path, target, out)
            wrong = None if digests(out) == truth else "the rerun writes something else"
        if wrong is None and sorted(os.listdir(folder)) not in (["out"], []):
            wrong = f"litter: {os.listdir(folder)}"
        for path in folder.iterdir():
            shutil.rmtree(path)
        yield what, ("killed, and done by the rerun" if was_killed else "equal", wrong)


def errors(sample: Sample, folder: Path, random: Random) -> Iterator[tuple[str, Ending]]:
    """Let one system call fail during a conversion, and run it again if it kept finished work."""
    while True:
        target, truth = some_target(sample, random, {How.WRITTEN})
        out = folder / "out"
        name, number, code = random.choice((*CALLS, "preadv")), random.randint(1, 30), random.choice(_ERRORS)
        what = f"{sample.name} to {target}: {errno.errorcode[code]} at call {number} of {name}"
        ending: Ending
        kept: list[str] = []
        with failing_at_call(name, number, code):
            try:
                write(sample.path, target, out)  # the digests are the campaign's own, and read folders, too
                ending = ("equal", None)
            except CkptError as error:
                ending, kept = (f"refused with {error.exit_code}", None), getattr(error, "__notes__", [])
            except OSError:  # the command line exits with 7
                ending = ("refused with 7", None)
            except Exception as error:
                ending = ("", f"{type(error).__name__}: {error}")
        wrong = ending[1] or _left(out, truth)
        if ending[0] == "equal" and not out.exists():
            wrong = "nothing is written, and nothing said"
        if wrong is None and kept:
            write(sample.path, target, out)
            wrong = None if digests(out) == truth else "the rerun writes something else"
        litter = [path for path in os.listdir(folder) if path != "out"]
        if wrong is None and litter and name not in _CLEARING:
            wrong = f"litter: {litter}"
        for path in folder.iterdir():
            shutil.rmtree(path)
        yield what, (ending[0], wrong)


_NUMBERS = ("0", "-1", "1", "3", "1000000000", "1e9", "nan", "inf", "", " ", "0x10", "9" * 400, "½")
_WORDS = ("", ".", "..", "/", "~", "hf", "auto", "\x1b[31m", "a\nb", "a" * 5000, "--", "-", "*", "\udcff", "None")
_NUMBERED = ("--world-size", "--tp", "--pp", "--ep", "--vpp", "--workers", "--max-shard-size", "--max-memory")
_WORDED = ("--dtype", "--tag", "--config", "--names", "--only", "--replica", "--optimizer-dtype", "--format")


def arguments(sample: Sample, folder: Path, random: Random) -> Iterator[tuple[str, Ending]]:
    """Run command lines with senseless arguments.

    Expect a documented exit code, no traceback and an unchanged source.
    """
    while True:
        command = random.choice(("convert", "verify", "inspect", "hash", "merge-lora", "estimate", "formats"))
        paths = [str(sample.path), str(folder / "none"), random.choice(_WORDS)]
        given = [command]
        if command == "convert":
            given += [random.choice(("auto", *_WORDS)), random.choice(("hf", "full", "zero2", *_WORDS))]
        given += random.choices(paths, weights=(6, 1, 1), k=random.choice((1, 1, 2)))
        for _ in range(random.randint(0, 2)):
            numbered = random.random() < 0.6
            names, values = (_NUMBERED, _NUMBERS) if numbered else (_WORDED, _WORDS)
            given += [random.choice(names), random.choice(values)]
        if command in ("convert", "merge-lora"):
            given += ["-o", str(folder / "out"), "-q"]
        wrong = None
        try:
            result = run_ckpt(*given)
            code = result.code
            if code not in (0, 1, 2, 3, 4, 5, 6, 7) or (code == 1 and command != "verify"):
                wrong = f"exit code {code}: {result.err[-300:]}"
        except Exception as error:
            code, wrong = -1, f"{type(error).__name__}: {error}"
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield f"ckpt {' '.join(repr(one[:60]) for one in given)}", (f"exit code {code}", wrong)
