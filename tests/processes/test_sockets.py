"""`ckpt/processes/sockets.py`, `ckpt/processes/messages.py`: messages between processes without torch."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from ckpt.base.streams import TerminatedError
from ckpt.errors import CorruptError, IncompleteError, SeveralRunsError, StorageError
from ckpt.processes import sockets
from ckpt.processes.group import ProcessGroup
from ckpt.processes.messages import dump, load
from ckpt.processes.sockets import Sockets, meet
from tests.processes.test_many_nodes import free_port


def together(
    action: Callable[[Sockets], Any], *starts: tuple[int, int, str], patience: float = 20, address: str = "127.0.0.1"
) -> list[Any]:
    """Run `action` in threads for these ranks, sizes and jobs. Return the results and errors."""
    port = free_port()

    def start(rank: int, size: int, job: str) -> Any:
        try:
            with meet(rank, size, job, address, port, timedelta(seconds=patience)) as met:
                return action(met)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(starts)) as threads:
        return [one.result(60) for one in [threads.submit(start, *words) for words in starts]]


@pytest.fixture(autouse=True)
def first_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the other ranks wait for its process to end."""
    monkeypatch.setattr(sockets, "TELLING", timedelta(seconds=0.05))


THREE = [(rank, 3, "") for rank in range(3)]


NAME = f"@ckpt-test-{os.getpid()}"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "localhost", "::1", NAME, socket.gethostname()], ids=["v4", "name", "v6", "unix", "host"]
)
def test_everyone_gets_every_message(address: str) -> None:
    sent = [b"", b"b" * 3_000_000, b"c"]
    found = together(lambda met: [met.all_gather(sent[met.rank]) for _ in range(2)], *THREE, address=address)
    assert found == [[sent] * 2] * 3


def test_another_users_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    stranger = f"a process of user {os.getuid()} is there"
    with sockets._listener(NAME, 0, 1) as listener:
        (found,) = together(lambda met: None, (1, 2, ""), patience=0, address=NAME)
        assert str(found) == f"something else listens there: {stranger}"
        assert sockets._greeted(listener, 2, "", {}) is None


def test_a_process_that_reaches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    port, create = free_port(), socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda at, wait: create(at, wait, source_address=at))
    with pytest.raises(ConnectionError, match="reached itself"):
        sockets.connect("127.0.0.1", port, time.monotonic())


def test_a_stranger_who_sends_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't hold up the others for longer than one greeting."""
    monkeypatch.setattr(sockets, "_GREETING", timedelta(seconds=0.3))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as stranger,
        ThreadPoolExecutor(1) as threads,
    ):
        greeted = threads.submit(sockets._greeted, server, 2, "", {})
        end = time.monotonic() + 5
        with suppress(OSError):
            while not greeted.done() and time.monotonic() < end:
                stranger.sendall(b"c")
                time.sleep(0.05)
        assert greeted.done() and greeted.result() is None


def test_values_and_progress_of_a_group() -> None:
    def talk(met: Sockets) -> Any:
        counted: list[int] = []
        with ProcessGroup(met) as group:
            group.count_all_ranks(counted.append)(10)
            found = group.gather({("a", group.rank): [1, (2, None)]})
        return found, sum(counted)

    found = [{("a", rank): [1, (2, None)]} for rank in range(3)]
    assert together(talk, *THREE) == [(found, 30), (found, 0), (found, 0)]


def test_an_error_is_everyones() -> None:
    def talk(met: Sockets) -> None:
        with ProcessGroup(met) as group:
            if group.rank == 2:
                raise IncompleteError("cut off", path="a", found=b"x", hint="copy it")
            group.gather(0)

    for error in together(talk, *THREE):
        assert type(error) is IncompleteError and error.exit_code == 4 and "cut off (in rank 2 of 3" in str(error)
        assert (error.path, error.found, error.hint) == ("a", "b'x'", "copy it")


@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_ends_is_named(dead: int) -> None:
    def talk(met: Sockets) -> None:
        if met.rank == dead:
            met.close()
            return
        with ProcessGroup(met) as group:
            group.gather(0)

    found = together(talk, *THREE)
    assert found.pop(dead) is None
    for error in found:
        assert type(error) is StorageError and f"rank {dead} of 3" in str(error)


def test_one_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SILENCE", timedelta(seconds=0.5))
    monkeypatch.setattr(sockets, "ROLL_CALL", timedelta(seconds=1))
    are_told = threading.Barrier(3)

    def talk(met: Sockets) -> None:
        try:
            if met.rank != 1:
                with ProcessGroup(met) as group:
                    group.gather(0)
        finally:
            are_told.wait(20)

    first, _, last = together(talk, *THREE)
    assert "rank 1 of 3" in str(first) and "no message within" in str(first) and str(last) == str(first)


def test_strangers_at_the_port() -> None:
    """They are sent away before their bytes are read."""
    port = free_port()
    greetings = [b"\xff" * 8, struct.pack(">Q", 2) + b"[]", struct.pack(">Q", 4000) + b"[" * 4000]
    strangers = [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(1), b"", *(b"ckptd" + sent for sent in greetings)]
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(meet, 0, 2, "", "127.0.0.1", port, timedelta(seconds=20))]
        for sent in strangers:
            with sockets.connect("127.0.0.1", port, time.monotonic() + 20) as stranger, suppress(OSError):
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        ranks.append(threads.submit(meet, 1, 2, "", "127.0.0.1", port, timedelta(seconds=20)))
        for rank in ranks:
            rank.result(20).close()


@pytest.mark.parametrize(
    ("starts", "first", "last"),
    [
        ([(0, 2, ""), (1, 3, "")], "did not come: 1", "rank 0 is one of 2 processes, and rank 1 one of 3"),
        ([(0, 2, "a"), (1, 2, "b")], "did not come: 1", "listens there"),
        ([(0, 3, ""), (1, 3, ""), (1, 3, "")], "of 3 ranks did not come", ""),
        ([(1, 2, "")], "nothing listens there", ""),
    ],
)
def test_they_do_not_meet(starts: list[tuple[int, int, str]], first: str, last: str) -> None:
    found = together(lambda met: None, *starts, patience=0.7)
    assert first in str(found[0]) and last in str(found[-1])
    assert all(isinstance(error, ConnectionError) for error in found)


def test_what_is_sent() -> None:
    value = [None, True, 1, 1.5, "\udc80\n", (1, [()]), {1: 2, ("a", 0): {"tuple": "b"}}, {}]
    assert load(dump(value)) == value
    runs = load(dump(SeveralRunsError("/a", ["/a/b"])))
    assert (
        type(runs) is SeveralRunsError and runs.runs == ("/a/b",) and str(runs) == str(SeveralRunsError("/a", ["/a/b"]))
    )
    ended = load(dump(TerminatedError("terminated")))
    assert type(ended) is TerminatedError and ended.args == ("terminated",)

    class OtherError(CorruptError): ...

    assert isinstance(load(dump(OtherError("a"))), CorruptError)
    assert type(load(dump(OSError(28, "full")))) is RuntimeError
    with pytest.raises(TypeError, match="set can't be sent"):
        dump([{1}])


@pytest.mark.parametrize(
    "message", ["", "[", '{"a": 1}', '{"error": 1, "args": []}', '{"dict": [[[], 1]]}', "[" * 9999]
)
def test_what_is_no_message(message: str) -> None:
    with pytest.raises(ValueError):
        load(message)
