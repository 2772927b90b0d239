"""The campaign: cases of every kind over every sample, and a table of how they ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import ckpt
from ckpt.errors import CkptError
from tests.faults.kinds import CARRIED, KINDS, MISSING, NAME, VALUE, Case
from tests.faults.running import Ending, arguments, errors, kills
from tests.faults.samples import Sample, converted, intact, make_samples, tensors, tensors_of

#: Seconds that a case may take, on a machine that has other things to do.
_PATIENCE = 60
#: What part of the campaign each of these is.
_KILLS, _ERRORS, _ARGUMENTS = "killed at a call to the system", "a call to the system fails", "arguments without sense"
_PARTS = {_KILLS: 0.03, _ERRORS: 0.04, _ARGUMENTS: 0.03}


@dataclass
class Report:
    """How many cases of each kind ended how, and those that must not have ended so."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    hidden: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str, ending: Ending) -> None:
        name, fault = ending
        self.counts.setdefault(kind, Counter())["WRONG" if fault else name] += 1
        if fault:
            self.wrong.append(f"{kind}: {what}: {fault}")

    @property
    def num_cases(self) -> int:
        return sum(sum(counter.values()) for counter in self.counts.values())

    def lines(self) -> Iterator[str]:
        for kind, counter in self.counts.items():
            yield f"{kind:<32} {sum(counter.values()):>6}"
            yield from (f"    {name:<40} {count:>6}" for name, count in sorted(counter.items()))
        yield f"{'all':<32} {self.num_cases:>6}"
        if self.hidden:
            yield "what nothing on the disk reveals:"
            yield from (f"    {name:<60} {count:>6}" for name, count in sorted(self.hidden.items()))
        yield from self.wrong


def _ending(sample: Sample, run: Path, target: str, case: Case, out: Path, report: Report) -> Ending:
    """What a conversion of the damaged `run` makes of it."""
    try:
        found = converted(run, target, out)
    except CkptError as error:
        code = error.exit_code
        allowed = (2, 3, 4, 5, 6, 7) if case.hidden == CARRIED else (3, 4, 5, 6, 7)  # a config may be of no known model
        return f"refused with {code}", None if code in allowed else f"exit code {code}: {error.what}"
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"
    if found == intact(sample)[target]:
        return "equal to the truth", None
    checkpoint = ckpt.open(run)
    if checkpoint.passed_over:
        return "an older checkpoint is taken, and said to be", None
    if case.hidden == VALUE and set(checkpoint.notes) - set(ckpt.open(sample.path).notes):
        return "something is left out, and said to be", None
    there, expected = tensors_of(checkpoint), tensors(sample)
    hidden = case.hidden or (NAME if there == expected and case.is_unchecked else None)
    if hidden is None:
        return "", f"something else is written as {target}, and nothing said"
    if there.total() < expected.total() and hidden != MISSING:
        return "", f"tensors are lost on the way to {target}, and nothing is said"
    report.hidden[hidden] += 1
    return "different, and nothing on the disk reveals it", None


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Nothing waits for the disk, which is no part of what is tried here, and nothing waits for ever."""

    def over(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_PATIENCE} s")

    fsync, before = os.fsync, signal.signal(signal.SIGALRM, over)
    os.fsync = lambda descriptor: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.fsync = fsync
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def campaign(folder: Path, seed: int, num_cases: int) -> Report:
    """Some `num_cases` cases in an empty `folder`.  The same seed makes the same cases."""
    report, random = Report(), Random(seed)
    with _quick():
        (folder / "samples").mkdir()
        samples = make_samples(folder / "samples")
        for kind, (cases, part) in KINDS.items():
            streams = [(sample, cases(sample, random)) for sample in samples]
            for sample, stream in itertools.islice(_in_turn(streams, random), round(part * num_cases)):
                case = next(stream, None)
                if case is None:
                    continue
                signal.alarm(_PATIENCE)
                run, out = sample.copy(folder / "run" / sample.name), folder / "out"
                case.do(run)
                target = random.choice(list(intact(sample)))
                ending = _ending(sample, run, target, case, out, report)
                report.add(kind, f"{sample.name}: {case.what}", ending)
                shutil.rmtree(folder / "run")
                shutil.rmtree(out, ignore_errors=True)
        place = folder / "place"
        place.mkdir()
        for kind, part in _PARTS.items():
            left = round(part * num_cases)
            while left > 0:
                sample = random.choice(samples)
                stream_of = {
                    _KILLS: lambda sample=sample: kills(sample, place, random, 10),
                    _ERRORS: lambda sample=sample: errors(sample, place, random),
                    _ARGUMENTS: lambda sample=sample: arguments(sample, place, random),
                }[kind]
                for what, ending in itertools.islice(stream_of(), min(10, left)):
                    signal.alarm(_PATIENCE)
                    report.add(kind, what, ending)
                    left -= 1
    return report


def _in_turn(streams: list[tuple[Sample, Iterator[Case]]], random: Random) -> Iterator[tuple[Sample, Iterator[Case]]]:
    order = random.sample(streams, k=len(streams))  # of a few cases, not always the first samples
    return itertools.cycle(order)
