"""`ckpt/commands/watch/watcher.py` and `ckpt/training/heartbeat.py`: stopped, killed, stuck or failed ranks."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ckpt.commands.watch import watcher
from ckpt.commands.watch.watcher import Watcher, is_waiting, main_stack
from ckpt.training.heartbeat import Heart
from tests.support.commands import ckpt
from tests.support.places import REPOSITORY

#: A rank that sends heartbeats, is in a "collective" or in its own code, and continues on a line from stdin.
RANK = """
import sys
from pathlib import Path
from ckpt.training.heartbeat import Heart

def all_reduce(): sys.stdin.readline()
def load_shard_7(): sys.stdin.readline()

run, rank, where, world_size = sys.argv[1:]
with Heart(Path(run), int(rank), int(world_size), 0.1, 1.0) as heart:
    heart.enter("training", 5)
    if where == "fails": raise ValueError
    {"waits": all_reduce, "hangs": load_shard_7}[where]()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(ranks: list[subprocess.Popen[str]], run: Path, *places: str, world_size: int = 0) -> None:
    for rank, where in enumerate(places):
        command = [sys.executable, "-c", RANK, str(run), str(rank), where, str(world_size or len(places))]
        ranks.append(
            subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    wanted = [(run / "heartbeats" / f"rank-{rank}.json") for rank in range(len(places))]
    end = time.monotonic() + 60
    while not all(file.is_file() and '"step": 5' in file.read_text() for file in wanted):
        assert time.monotonic() < end, "the ranks do not beat"
        time.sleep(0.02)


def watch(run: Path, *options: str) -> tuple[int, str]:
    done = ckpt("watch", run, "--every", "0.1", *options)
    return done.code, done.out + done.err


def test_a_stopped_rank_is_named_with_its_last_stack(
    tmp_path: Path, ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = Watcher._dumps  # a stopped rank writes none, however long the watcher waits
    monkeypatch.setattr(Watcher, "_dumps", lambda self, ranks, patience: dumps(self, ranks, patience / 10))
    start(ranks, tmp_path, "waits", "hangs", "waits")
    os.kill(ranks[1].pid, signal.SIGSTOP)
    code, out = watch(tmp_path, "--silent", "1")
    assert code == 1
    first, file, *stack = out.splitlines()
    assert first.startswith(f"rank 1 (pid {ranks[1].pid} on ") and "no sign of life for" in first
    assert first.endswith("in step 5, phase 'training'")
    assert file == f"stack: {tmp_path}/heartbeats/rank-1.stack" and "in load_shard_7" in "\n".join(stack)
    assert "rank 0" not in out and "rank 2" not in out


def test_of_ranks_that_all_stand_still_the_one_that_waits_for_nobody_is_named(
    tmp_path: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    start(ranks, tmp_path, "waits", "waits", "hangs")
    code, out = watch(tmp_path, "--stuck", "1")
    assert code == 1
    first, file, *stack = out.splitlines()
    assert first.startswith("rank 2 ") and "beats, but has been there for" in first
    assert file == f"stack: {tmp_path}/heartbeats/rank-2.dump" and stack[0].endswith("(most recent call first):")
    assert stack[1].endswith("in load_shard_7")
    assert "rank 0" not in out and "rank 1" not in out


def test_ranks_of_other_machines_dump_their_stacks_on_request(
    tmp_path: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    start(ranks, tmp_path, "waits")
    (tmp_path / "heartbeats" / "request").touch()
    dump, end = tmp_path / "heartbeats" / "rank-0.dump", time.monotonic() + 60
    while "in all_reduce" not in dump.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_rank_is_named_and_the_webhook_is_called(tmp_path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    posted = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    start(ranks, tmp_path, "waits", "waits", "waits")
    ranks[0].kill()
    ranks[0].wait()
    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ("--webhook", f"http://127.0.0.1:{server.server_port}/")
        code, out = watch(tmp_path, *options)
        nobody_reads, terminal = os.pipe()
        os.close(nobody_reads)
        command = [sys.executable, "-m", "ckpt", "watch", str(tmp_path), "--every", "0.1", *options]
        unread = subprocess.run(command, cwd=REPOSITORY, stdout=terminal, stderr=subprocess.PIPE, timeout=90)
        os.close(terminal)
        server.shutdown()
    assert code == 1 and out.startswith(f"rank 0 (pid {ranks[0].pid} on ") and "is gone" in out
    assert [(one["kind"], one["rank"], one["step"]) for one in posted[0]["findings"]] == [("dead", 0, 5)]
    assert posted[0]["text"].startswith(f"{tmp_path}: rank 0 ")
    for one in posted:  # two watchers heard the last beat at different times
        one["findings"][0].pop("seconds")
    assert posted[1] == posted[0], "also where the watcher's terminal is gone"
    assert (unread.returncode, unread.stderr) == (1, b"")


def test_a_rank_that_failed_is_named_and_ranks_that_are_done_end_the_watch(
    tmp_path: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    start(ranks, tmp_path, "waits", "fails")
    code, out = watch(tmp_path)
    assert code == 1 and out.startswith("rank 1 ") and "failed: ValueError" in out
    ranks[1].wait()
    start(ranks, tmp_path / "again", "waits")
    ranks[2].communicate("go on\n", timeout=60)
    assert watch(tmp_path / "again") == (0, f"{tmp_path / 'again'}: all done, 1 rank, before this watch\n")
    assert json.loads(watch(tmp_path / "again", "--json")[1])["had_ended"] is True


def test_a_killed_rank_is_named_before_the_rank_that_failed_without_it(tmp_path: Path) -> None:
    """The other rank fails at once. The killed one's beats are late only after that."""
    now = time.monotonic()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hearts = [Heart(tmp_path, rank, 2, 30, 1.0) for rank in range(2)]
    hearts[1].facts["pid"] = ended.pid
    for heart in hearts:
        heart._beat()
    hearts[0].enter("failed: RuntimeError", 5)
    hearts[0]._beat()
    seen = Watcher(tmp_path, silent=600, stuck=600, clock=lambda: now)
    seen.look()
    assert seen.findings() == []
    now += 61
    assert [(one.kind, one.rank) for one in seen.findings()] == [("failed", 0)], "rank 1 is invisible, but beats"
    with mock.patch.object(time, "time", return_value=time.time() + 61):
        assert [(one.kind, one.rank) for one in seen.findings()] == [("dead", 1), ("failed", 0)]


def test_ranks_without_a_heartbeat_are_named_also_if_all_others_are_done(
    tmp_path: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    start(ranks, tmp_path, "waits", world_size=3)
    for _ in range(2):  # running, then done
        code, out = watch(tmp_path, "--silent", "0.5")
        assert code == 1 and [line.partition(" for ")[0] for line in out.splitlines()] == [
            "rank 1 has written no heartbeat here",
            "rank 2 has written no heartbeat here",
        ]
        if ranks[0].poll() is None:
            ranks[0].communicate("go on\n", timeout=60)


def test_ranks_have_time_for_their_first_beat_after_a_restart(tmp_path: Path) -> None:
    now = 0.0
    seen = Watcher(tmp_path, silent=30, stuck=600, clock=lambda: now)
    for started, num_ranks in ((1.0, 2), (2.0, 1)):  # hours later, rank 0 beats first
        now += 9999
        for rank in range(num_ranks):
            Heart(tmp_path, rank, 2, 5.0, started)._beat()
        seen.look()
        assert not seen.findings()
    now += 29
    seen.ranks[0].beat = now
    assert not seen.findings()
    now += 2
    (tmp_path / "heartbeats" / "rank-1.stack").write_text("the earlier start's")
    assert [(one.kind, one.rank, one.seconds, one.stack) for one in seen.findings()] == [("missing", 1, 31.0, "")]


def test_a_strange_heartbeat_is_none(tmp_path: Path) -> None:
    seen = Watcher(tmp_path, silent=30, stuck=600, clock=lambda: 0.0)
    Heart(tmp_path, 0, 2, 5.0, 1.0)._beat()
    facts = json.loads((tmp_path / "heartbeats" / "rank-0.json").read_text()) | {"rank": 1}
    for strange in ("[]", "1", '{"rank": 1}', *(json.dumps(facts | {name: None}) for name in facts)):
        (tmp_path / "heartbeats" / "rank-1.json").write_text(strange)
        seen.look()
        assert seen.missing == [1], strange
    (tmp_path / "heartbeats" / "rank-1.json").write_text(json.dumps(facts))
    seen.look()
    assert seen.missing == []


def test_the_end_of_a_run_is_told_from_an_earlier_runs(tmp_path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    start(ranks, tmp_path, "waits")
    looks: list[None] = []

    def look(self: Watcher) -> None:
        looks.append(None)
        if len(looks) == 2:
            ranks[0].communicate("go on\n", timeout=60)
        real(self)

    real = Watcher.look
    with mock.patch.object(Watcher, "look", look):
        watched = watcher.watch(tmp_path, 30, 600, 0.01, lambda _: None)
    assert not watched.had_ended and watcher.watch(tmp_path, 30, 600, 0.01, lambda _: None).had_ended


def test_a_beating_rank_is_not_dead_even_if_its_process_is_invisible(tmp_path: Path) -> None:
    """A container on the host's network has the host's name and its own process numbers."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    heart = Heart(tmp_path, 0, 1, 30, 1.0)
    heart.facts["pid"] = ended.pid
    with heart:
        watched = Watcher(tmp_path, 30, 600)
        watched.look()
        assert watched.ranks and watched.findings() == []
        facts = json.loads(heart.path("json").read_text())
        later = {"beats": 7, "time": facts["time"] - 61}
        heart.path("json").write_text(json.dumps(facts | later))
        watched.look()
    (finding,) = watched.findings()
    assert (finding.kind, finding.pid) == ("dead", ended.pid)


def test_a_folder_without_heartbeats(tmp_path: Path) -> None:
    code, out = watch(tmp_path, "--silent", "0.2")
    assert code == 3 and "hint: give the trainer's output folder" in out


DUMP = (
    "Thread 0x00000000000000b2 (most recent call first):\n"
    '  File "h.py", line 1 in wait\n\n'
    "Current thread 0x00000000000000a1 (most recent call first):\n"
    '  File "t.py", line 2 in matmul\n  File "t.py", line 3 in all_reduce\n  File "t.py", line 4 in wait\n'
)


def test_a_dump_is_read_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines of a rank that waits look like a rank that does not."""
    lines = DUMP.replace("matmul", "wait_stream").splitlines(keepends=True)
    stack = "".join(lines[3:]).strip()
    (tmp_path / "heartbeats").mkdir()

    def write_a_line(_: float) -> None:
        with (tmp_path / "heartbeats" / "rank-0.dump").open("a") as file:
            file.writelines(lines[:1])
        del lines[:1]

    monkeypatch.setattr(time, "sleep", write_a_line)
    rank = watcher.RankFacts({"rank": 0, "host": "elsewhere", "thread": "0x00000000000000a1"}, 0, 0)
    assert Watcher(tmp_path, 30, 600)._dumps([rank], 60) == {0: stack}
    assert is_waiting(stack) and not is_waiting(stack.splitlines()[0])


def test_stacks_of_faulthandler() -> None:
    main = main_stack(DUMP, "0x00000000000000a1")
    assert main.splitlines()[1:] == DUMP.splitlines()[4:]
    assert main_stack(DUMP + DUMP, "0x00000000000000a1") == main, "after a signal and a request"
    assert main_stack(f"{main}\n\n{DUMP.partition('Current')[0]}", "0x00000000000000a1") == main
    assert main_stack(DUMP, "0x00000000000000c3") == ""
    assert not is_waiting('  File "x.py", line 1 in awaited_items') and not is_waiting("")
    assert is_waiting('  File "x.py", line 1 in _engine_run_backward')
    assert is_waiting('  File "x.py", line 1 in broadcast\n  File "x.py", line 2 in main')
    assert not is_waiting("\n".join(main.splitlines()[:2]))
