"""The campaign: every kind of case on every sample, and a table with the endings."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import ckpt
from ckpt.errors import CkptError
from ckpt.plan.planner import check_source
from ckpt.runs.recorded_precision import TRAINING_ARGS
from tests.faults.claims import CLASSES as OF_RUNS
from tests.faults.claims import Maker, Outcome, lies
from tests.faults.comparisons import CLASSES as OF_COMPARISONS
from tests.faults.excuses import LOST, excuse
from tests.faults.kinds import CARRIED, COPIED, KINDS, MISSING, VALUE, Case, in_its_place
from tests.faults.outputs import CLASSES as OF_OUTPUTS
from tests.faults.records import kept, stopped
from tests.faults.running import EXCUSED, Ending, arguments, errors, kills
from tests.faults.samples import How, Sample, converted, make_samples, some_target, tensors, tensors_of
from tests.faults.stores import stores
from tests.faults.views import CLASSES as OF_VIEWS

#: Seconds for a case on a busy machine.
_PATIENCE = 120
#: Makers of false claims, and each class's share in the campaign.
CLASSES: dict[str, tuple[Maker, float]] = {**OF_RUNS, **OF_COMPARISONS, **OF_OUTPUTS, **OF_VIEWS}
#: Each stream's share in the campaign.
Stream = Callable[[Sample, Path, Random], Iterator[tuple[str, Ending]]]
Adding = Callable[[Sample, Path, Random], Iterator[None]]
PARTS: dict[str, tuple[Stream, float]] = {
    "killed at a call to the system": (partial(kills, most=10), 0.03),
    "a call to the system fails": (errors, 0.04),
    "arguments without sense": (arguments, 0.03),
    "a stopped conversion damaged": (stopped, 0.02),
    "a kept conversion damaged": (kept, 0.02),
    "a store in which requests fail": (stores, 0.01),
}
_FEWEST_KINDS = 5  # minimum number of kinds to disprove a claim
_PER_TURN = _FEWEST_KINDS  # cases per sample and turn
_MOST_TURNS = 20  # turns added for a claim and format with too few kinds
_ENOUGH = 10_000  # cases: a larger campaign has all kinds


@dataclass
class Report:
    """Case counts by kind and ending, and the wrong endings."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    #: Kinds by disproved claim and format.
    claims: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    #: Classes and samples that disproved them.
    origins: dict[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)

    def add(self, kind: str, what: str, ending: Ending) -> None:
        name, fault = ending
        self.counts.setdefault(kind, Counter())["WRONG" if fault else name] += 1
        if fault:
            self.wrong.append(f"{kind}: {what}: {fault}")
            print(self.wrong[-1], file=sys.stderr, flush=True)

    def __add__(self, other: Report) -> Report:
        both = Report(wrong=[*self.wrong, *other.wrong])
        for report in (self, other):
            for kind, counter in report.counts.items():
                both.counts.setdefault(kind, Counter()).update(counter)
            for claim, kinds in report.claims.items():
                both.claims.setdefault(claim, Counter()).update(kinds)
        return both

    def add_claimed(self, name: str, sample: Sample, case: Outcome) -> None:
        self.add(name, case.what, case.ending)
        for claim in case.claims:
            self.claims.setdefault((claim, case.format), Counter())[case.kind] += 1
            self.origins.setdefault((claim, case.format), set()).add((name, sample.name))

    def check_claims(self) -> None:
        """Record an error if a whole campaign disproves a claim in too few ways."""
        for (claim, format), kinds in self.claims.items():
            if self.num_cases >= _ENOUGH and len(kinds) < _FEWEST_KINDS:
                self.wrong.append(f"{claim}, of {format}: made false in {len(kinds)} ways only: {', '.join(kinds)}")

    def _excuses(self) -> Iterator[str]:
        """Yield each kind's number of excused cases, and why nothing on the disk reveals the difference."""
        yield "excused:"
        for kind, counter in self.counts.items():
            excused = {name: count for name, count in sorted(counter.items()) if name.startswith(EXCUSED)}
            total = sum(counter.values())
            yield f"    {kind:<32} {sum(excused.values()):>6} of {total:>6} ({sum(excused.values()) / total:.1%})"
            yield from (f"        {count:>6}  {name.removeprefix(f'{EXCUSED}: ')}" for name, count in excused.items())

    @property
    def num_cases(self) -> int:
        return sum(sum(counter.values()) for counter in self.counts.values())

    def lines(self) -> Iterator[str]:
        for kind, counter in self.counts.items():
            yield f"{kind:<32} {sum(counter.values()):>6}"
            yield from (
                f"    {name:<40} {count:>6}" for name, count in sorted(counter.items()) if not name.startswith(EXCUSED)
            )
        yield f"{'all':<32} {self.num_cases:>6}"
        yield from self._excuses()
        yield "claims that were made false:"
        for (claim, format), kinds in sorted(self.claims.items()):
            yield f"    {claim:<30} {format:<20} {len(kinds):>3} kinds of changes {kinds.total():>6}"
        yield from self.wrong


def _ending(sample: Sample, run: Path, target: str, truth: dict[str, str], case: Case, out: Path) -> Ending:
    """Return how converting the damaged `run` ends."""
    try:
        found = converted(run, target, out)
    except CkptError as error:
        code = error.exit_code
        # The config may describe an unknown model.
        allowed = (2, 3, 4, 5, 6, 7) if case.hidden == CARRIED else (3, 4, 5, 6, 7)
        wrong = None if code in allowed else f"as {target}: exit code {code}: {error.what}"
        return f"refused with {code}", wrong or _unseen(run)
    except (Exception, _Over) as error:
        return "", f"as {target}: {type(error).__name__}: {error}"
    if case.is_stray and ckpt.check(run).whole:
        return "", "a file that no reader opened, and ckpt check calls it whole"
    if found == truth:
        return "equal to the truth", None
    checkpoint = ckpt.open(run)
    if checkpoint.passed_over:
        return "an older checkpoint is taken, and said to be", None
    may_be_said = case.hidden in (VALUE, CARRIED, COPIED, MISSING) or case.is_unchecked or TRAINING_ARGS in case.what
    intact = ckpt.open(sample.path)
    if may_be_said and {*checkpoint.notes, *checkpoint.unread} - {*intact.notes, *intact.unread}:
        return "something is left out, and said to be", None
    reason = excuse(sample, run, case, found, truth)
    if reason is None:
        return "", f"something else is written as {target}, and nothing said"
    if tensors_of(checkpoint).total() < tensors(sample).total() and reason != LOST:
        return "", f"tensors are lost on the way to {target}, and nothing is said"
    return f"{EXCUSED}: {reason}", None


def _unseen(run: Path) -> str | None:
    """Return the fault in the reports from `ckpt check` and `ckpt.resume` if a conversion refused the run."""
    try:
        checkpoint = ckpt.open(run)
        for tensor in checkpoint.tensors.values():
            check_source(tensor)
        return None  # the refusal has a cause outside the source's elements
    except CkptError as error:
        refused = error
    except Exception as error:
        return f"{type(error).__name__} as it is opened: {error}"
    try:
        if ckpt.check(run).whole:
            return f"ckpt check calls it whole: {refused.what}"
    except CkptError:
        pass
    except Exception as error:
        return f"ckpt check: {type(error).__name__}: {error}"
    try:
        found = ckpt.resume(run, say=lambda _: None)
    except CkptError:
        return None
    except Exception as error:
        return f"ckpt.resume: {type(error).__name__}: {error}"
    return f"ckpt.resume takes it, {found}: {refused.what}"


class _Over(BaseException):
    """A case takes too long. Unlike a TimeoutError, it can't be mistaken for a disk error."""


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Skip all waiting for the disk, and end a case after the time limit."""

    def over(*_: object) -> None:
        raise _Over(f"it takes more than {_PATIENCE} s")

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


def campaigns(folder: Path, seed: int, num_cases: int, num_processes: int) -> Report:
    """Run about `num_cases` cases in an empty `folder` on several processes. Equal arguments give equal cases."""
    places = [folder / str(number) for number in range(num_processes)]
    for place in places:
        place.mkdir()
    jobs = [(place, f"{seed}.{place.name}", round(num_cases / num_processes), num_cases >= _ENOUGH) for place in places]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        report = sum(pool.starmap(campaign, jobs, chunksize=1), Report())
    report.check_claims()
    return report


def campaign(folder: Path, seed: int | str, num_cases: int, is_whole: bool = False) -> Report:
    """Run about `num_cases` cases in an empty `folder`. Equal seeds give equal cases.

    A whole campaign adds cases until each claim is disproved in enough ways for each format.
    """
    import torch  # noqa: F401  # which some conversions ask about a model, and which takes longer than they may
    import transformers  # noqa: F401

    report, random = Report(), Random(seed)
    with _quick():
        (folder / "samples").mkdir()
        samples = make_samples(folder / "samples")
        for kind, (cases, part) in KINDS.items():
            hows = set(How) - {How.FROM_A_STORE} if cases is in_its_place else How  # a store has no pipes
            streams = [(sample, cases(sample, random)) for sample in samples]
            for sample, stream in itertools.islice(_in_turn(streams, random), round(part * num_cases)):
                case = next(stream, None)
                if case is None:
                    continue
                signal.alarm(_PATIENCE)
                run, out = sample.copy(folder / "run" / sample.name), folder / "out"
                case.do(run)
                target, truth = some_target(sample, random, hows)
                try:
                    ending = _ending(sample, run, target, truth, case, out)
                except Exception as error:  # the description itself is invalid
                    ending = "", f"as {target}: what was read contradicts itself: {type(error).__name__}: {error}"
                report.add(kind, f"{sample.name}: {case.what}", ending)
                shutil.rmtree(folder / "run")
                shutil.rmtree(out, ignore_errors=True)
        place = folder / "place"
        place.mkdir()
        streams_of = {
            **{kind: (_told(stream_of, kind, report), part) for kind, (stream_of, part) in PARTS.items()},
            **{kind: (_claimed(make, kind, report), part) for kind, (make, part) in CLASSES.items()},
        }
        for kind, (add_some, part) in streams_of.items():
            left = round(part * num_cases)
            turns = itertools.cycle(random.sample(samples, k=len(samples)))
            while left > 0:
                left -= _add_turn(report, kind, add_some, next(turns), place, random, most=min(_PER_TURN, left))
        named = {sample.name: sample for sample in samples}
        for pair, origins in [*report.origins.items()] if is_whole else []:
            for kind, name in itertools.islice(itertools.cycle(sorted(origins)), _MOST_TURNS):
                if len(report.claims[pair]) >= _FEWEST_KINDS:
                    break
                _add_turn(report, kind, streams_of[kind][0], named[name], place, random, most=_PER_TURN)
    return report


def _add_turn(
    report: Report, kind: str, add_some: Adding, sample: Sample, place: Path, random: Random, *, most: int
) -> int:
    """Add at most `most` cases of a kind. Return their number, with a case that fails."""
    count = 0
    signal.alarm(_PATIENCE)
    try:
        for _ in itertools.islice(add_some(sample, place, random), most):
            signal.alarm(_PATIENCE)
            count += 1
    except (Exception, _Over) as error:
        report.add(kind, f"{sample.name}: the case behind the last one", ("", f"{type(error).__name__}: {error}"))
        count += 1
        shutil.rmtree(place)
        place.mkdir()
    return count


def _told(stream_of: Stream, kind: str, report: Report) -> Adding:
    def add(sample: Sample, place: Path, random: Random) -> Iterator[None]:
        for what, ending in stream_of(sample, place, random):
            yield report.add(kind, what, ending)

    return add


def _claimed(make: Maker, kind: str, report: Report) -> Adding:
    def add(sample: Sample, place: Path, random: Random) -> Iterator[None]:
        for case in lies(make, sample, place, random):
            yield report.add_claimed(kind, sample, case)

    return add


def _in_turn(streams: list[tuple[Sample, Iterator[Case]]], random: Random) -> Iterator[tuple[Sample, Iterator[Case]]]:
    order = random.sample(streams, k=len(streams))  # a small campaign must not always use the first samples
    return itertools.cycle(order)
