"""Search for a run's rank that died or stalled, with its stack.

docs/operations.md defines dead, frozen and stuck ranks. One stuck rank makes all ranks stuck: it is outside a
collective while others wait in it, or is behind them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import NotFoundError
from ckpt.training.heartbeat import DONE, FOLDER, REQUEST

DEAD, FROZEN, STUCK, FAILED, MISSING = "dead", "frozen", "stuck", "failed", "missing"
#: In names of functions that wait for other ranks or a GPU. DDP's C++ waits in backward passes.
_WAITING = frozenset(
    ["reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv", "wait", "backward", "synchronize", "item"]
)
_INNERMOST = 2  # frames to check


@dataclass(frozen=True)
class Finding:
    kind: str
    rank: int
    host: str
    pid: int
    step: int
    phase: str
    seconds: float
    stack: str
    stack_file: str

    def __str__(self) -> str:
        if self.kind == MISSING:
            return f"rank {self.rank} has written no heartbeat here for {self.seconds:.0f} s"
        what = {
            DEAD: "is gone: its process has ended",
            FROZEN: f"has given no sign of life for {self.seconds:.0f} s",
            STUCK: f"beats, but has been there for {self.seconds:.0f} s",
        }.get(self.kind, "ended with an error")
        return (
            f"rank {self.rank} (pid {self.pid} on {self.host}) {what}, in step {self.step}, phase {self.phase!r}\n"
            f"stack: {self.stack_file}\n{self.stack.rstrip()}"
        )


#: Entries of a heartbeat.
_KINDS: dict[str, Any] = dict.fromkeys(("rank", "world_size", "pid", "beats", "step"), int) | dict.fromkeys(
    ("every", "started", "since", "time"), (int, float)
)
_KINDS |= dict.fromkeys(("host", "thread", "phase"), str)


@dataclass
class RankFacts:
    facts: dict[str, Any]
    beat: float
    moved: float


class Watcher:
    """Reader of a run's heartbeats. Times are this machine's."""

    def __init__(self, run: Path, silent: float, stuck: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.silent, self.stuck, self.clock = run / FOLDER, silent, stuck, clock
        self.ranks: dict[int, RankFacts] = {}
        self.begin = clock()
        #: The start that all ranks share, and when this watcher first saw it.
        self._start, self._seen = 0.0, self.begin
        #: True if the run ended before the watch. A new start may not beat yet.
        self.had_ended = False

    def look(self) -> None:
        now = self.clock()
        for file in self.folder.glob("rank-*.json"):
            facts = _facts(file)
            if facts is None:
                continue
            known = self.ranks.get(facts["rank"])
            if known is None or known.facts["started"] < facts["started"]:
                self.ranks[facts["rank"]] = RankFacts(facts, now, now)
            elif known.facts["beats"] != facts["beats"]:
                same = all(known.facts[key] == facts[key] for key in ("step", "phase", "since"))
                self.ranks[facts["rank"]] = RankFacts(facts, now, known.moved if same else now)
        # An earlier start may have left files from more ranks.
        newest = max((seen.facts["started"] for seen in self.ranks.values()), default=0.0)
        if newest != self._start:
            self._start, self._seen = newest, now
        self.ranks = {rank: seen for rank, seen in self.ranks.items() if seen.facts["started"] == newest}

    @property
    def missing(self) -> list[int]:
        """Ranks of the run without a heartbeat."""
        world_size = max((seen.facts["world_size"] for seen in self.ranks.values()), default=0)
        return [rank for rank in range(world_size) if rank not in self.ranks]

    @property
    def finished(self) -> bool:
        return bool(self.ranks) and not self.missing and all(map(_is_done, self.ranks.values()))

    def findings(self) -> list[Finding]:
        now = self.clock()
        running = [seen for seen in self.ranks.values() if not _is_done(seen)]
        failed = [seen for seen in running if seen.facts["phase"].startswith(FAILED)]
        running = [seen for seen in running if seen not in failed]
        dead = [seen for seen in running if _is_gone(seen.facts)]
        if dead or failed:  # the first to end is guilty: others lost it, or torchrun ended them
            found = [(DEAD, seen) for seen in dead] + [(FAILED, seen) for seen in failed]
            found.sort(key=lambda one: one[1].facts["time"])
            kind, first = found[0]
            if kind == FAILED and len(dead) < len(running) and now - first.beat <= 2 * first.facts["every"]:
                return []  # a rank killed before is only known to be dead when its next beats are late
            return [self._finding(kind, seen, now - seen.beat) for kind, seen in found]
        if frozen := [seen for seen in running if now - seen.beat > max(self.silent, 2 * seen.facts["every"])]:
            # A rank waiting in C code, with the interpreter locked, still answers a signal.
            return [self._finding(FROZEN, seen, now - seen.beat, dump) for seen, dump in self._suspects(frozen, 3.0)]
        if self.missing and now - self._seen > self.silent:  # ranks start together
            seconds = round(now - self._seen, 1)
            return [Finding(MISSING, rank, "", 0, 0, "", seconds, "", "") for rank in self.missing]
        if running and all(now - seen.moved > self.stuck for seen in running):
            return [self._finding(STUCK, seen, now - seen.moved, dump) for seen, dump in self._suspects(running, 10.0)]
        return []

    def _suspects(self, stuck: list[RankFacts], patience: float) -> list[tuple[RankFacts, str]]:
        """Return the ranks that do not wait for others, or else all ranks behind."""
        dumps = self._dumps(stuck, patience)
        with_dumps = [(seen, dumps.get(seen.facts["rank"], "")) for seen in stuck]
        first = min(seen.facts["step"] for seen in stuck)
        behind = [(seen, dump) for seen, dump in with_dumps if seen.facts["step"] == first]
        return [(seen, dump) for seen, dump in with_dumps if not is_waiting(dump)] or behind

    def _dumps(self, ranks: list[RankFacts], patience: float) -> dict[int, str]:
        """Return the main threads' stacks.

        Ranks on this machine get a signal, other ranks see the request file.
        """
        files = {seen.facts["rank"]: self._file(seen.facts, "dump") for seen in ranks}
        before = {rank: _size(file) for rank, file in files.items()}
        (self.folder / REQUEST).touch()
        for seen in ranks:
            if seen.facts["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(seen.facts["pid"], signal.SIGUSR2)
        threads = {seen.facts["rank"]: seen.facts["thread"] for seen in ranks}
        found: dict[int, str] = {}
        last, end = before, time.monotonic() + patience
        while time.monotonic() < end and len(found) < len(ranks):
            sizes = {rank: _size(file) for rank, file in files.items()}
            for rank, file in files.items():
                if rank not in found and before[rank] < sizes[rank] == last[rank]:  # written to the end
                    stack = main_stack(file.read_bytes()[before[rank] :].decode(errors="replace"), threads[rank])
                    found |= {rank: stack} if stack else {}
            last = sizes
            time.sleep(0.05)
        return found

    def _finding(self, kind: str, seen: RankFacts, seconds: float, dump: str = "") -> Finding:
        facts = seen.facts
        file = self._file(facts, "dump" if dump else "stack")
        stack = dump or (file.read_text() if file.exists() else "(no stack was written)")
        return Finding(
            *(kind, facts["rank"], facts["host"], facts["pid"], facts["step"], facts["phase"]),
            *(round(seconds, 1), stack, str(file)),
        )

    def _file(self, facts: dict[str, Any], kind: str) -> Path:
        return self.folder / f"rank-{facts['rank']}.{kind}"


def main_stack(dump: str, thread: str) -> str:
    """Return thread `thread`'s part in faulthandler's dump, most recent call first, or "" if missing."""
    for part in re.split(r"\n(?=\n?(?:Current thread|Thread) 0x)", dump):
        if re.match(rf"\s*(Current thread|Thread) {thread} ", part):
            return part.strip()
    return ""


def is_waiting(stack: str) -> bool:
    innermost = re.findall(r" in (\S+)$", stack, re.MULTILINE)[:_INNERMOST]
    return any(word in _WAITING for name in innermost for word in name.split("_"))


def _facts(file: Path) -> dict[str, Any] | None:
    """Return a heartbeat, or None for a half or foreign file."""
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError):  # a file system without atomic replacement
        return None
    known = isinstance(facts, dict) and all(isinstance(facts.get(name), kind) for name, kind in _KINDS.items())
    return facts if known else None


def _is_done(seen: RankFacts) -> bool:
    return bool(seen.facts["phase"] == DONE)


def _is_gone(facts: dict[str, Any]) -> bool:
    """Return True if a rank on this machine has ended without a report.

    A beating rank has not: in a container, its process may be invisible here.
    """
    if facts["host"] != socket.gethostname() or time.time() - facts["time"] <= 2 * facts["every"]:
        return False
    try:
        state = Path(f"/proc/{facts['pid']}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return not Path(f"/proc/{facts['pid']}").exists()
    return state[0] in "ZX"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def call(webhook: str, run: Path, findings: list[Finding]) -> None:
    """Post the findings as JSON. Chat services show `text`."""
    text = "\n".join(str(finding).partition("\n")[0] for finding in findings)
    body = {"text": f"{run}: {text}", "run": str(run), "findings": [asdict(finding) for finding in findings]}
    request = urllib.request.Request(webhook, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except (OSError, urllib.error.URLError, ValueError) as error:
        print(f"watch: the webhook was not reached: {error}", file=sys.stderr)


def watch(run: Path, silent: float, stuck: float, every: float, report: Callable[[list[Finding]], None]) -> Watcher:
    """Watch a run until its ranks are done or `report` gets their problems.

    `silent`, `stuck` and `every` are seconds. Raise NotFoundError if no rank beats within `silent`.
    """
    watcher = Watcher(run, silent, stuck)
    is_first = True
    while True:
        watcher.look()
        if watcher.finished:
            watcher.had_ended = is_first
            return watcher
        if findings := watcher.findings():
            report(findings)
            return watcher
        if not watcher.ranks and time.monotonic() - watcher.begin > silent:
            raise NotFoundError(
                "no heartbeat found",
                path=watcher.folder,
                hint="give the trainer's output folder, with `heartbeats` in it",
            )
        is_first = False
        time.sleep(every)
