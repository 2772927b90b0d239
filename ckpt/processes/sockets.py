"""Sockets between processes: a star around the first one."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta

from ckpt.base.errors import CkptError
from ckpt.base.text import pluralize
from ckpt.processes.transport import ROLL_CALL, SILENCE, TELLING

_GREETING = timedelta(seconds=5)  # for the first bytes on a new connection
_ATTEMPT = 5.0  # seconds to reach one of an address's hosts
_RETRY = 0.1  # seconds between attempts to connect
_LEAST = 0.001  # zero would not wait at all
_MAX_GREETING = 4096
_HEADER = struct.Struct(">4scQ")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MAGIC = b"ckpt"
_DATA, _END, _BUSY = b"d", b"e", b"b"
#: Begins an address that is a name on one machine, without a port (Linux's abstract Unix sockets).
ABSTRACT = "@"
_LOOPBACK = ("127.0.0.1", "localhost")


class Sockets:
    """The first process is connected to all `peers`, any other to the first.

    A peer that sends nothing for `silence` is lost.
    """

    def __init__(
        self, rank: int, size: int, peers: Mapping[int, socket.socket], silence: timedelta | None = None
    ) -> None:
        self.rank, self.size, self._peers, self._silence = rank, size, peers, silence or SILENCE
        self._missing: list[int] = []

    def all_gather(self, message: bytes) -> list[bytes]:
        return self._ask(message) if self.rank else self._serve(message)

    def _serve(self, message: bytes) -> list[bytes]:
        messages, why, end = [message], "", _after(self._silence)
        for rank, peer in self._peers.items():
            try:
                messages.append(_receive(peer, end))
            except OSError as error:
                if not why:
                    why, end = str(error), _after(ROLL_CALL)
                self._missing.append(rank)
        lengths = struct.pack(f">{len(messages)}Q", *map(len, messages))
        kind, answer = (_END, _dump(self._missing, why)) if why else (_DATA, b"".join([lengths, *messages]))
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # a process that ends now is found by the next exchange
                _send(peer, answer, kind)
        if why:
            raise ConnectionError(why)
        return messages

    def _ask(self, message: bytes) -> list[bytes]:
        first = self._peers[0]
        try:
            _send(first, message)
            end = _after(self._silence + 4 * ROLL_CALL)  # the first process names a silent one before
            answer = _receive(first, end)
        except _EndError as error:
            self._missing = error.missing
            raise
        except OSError as error:
            self._missing = [0]
            raise ConnectionError(str(error)) from None
        head = struct.Struct(f">{self.size}Q")
        messages, at = [], head.size
        for length in head.unpack_from(answer):
            messages.append(answer[at : at + length])
            at += length
        return messages

    def missing(self) -> list[int]:
        return self._missing

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the first process print a common error and end first: launchers kill the remaining ones."""
        if isinstance(error, CkptError) and self.rank == 0:
            atexit.register(self.close)
            return
        if isinstance(error, CkptError):
            with contextlib.suppress(OSError):
                self._peers[0].settimeout(TELLING.total_seconds())
                self._peers[0].recv(1)
        self.close()


class _EndError(ConnectionError):
    """The other side ends the exchange."""

    def __init__(self, missing: list[int], why: str) -> None:
        super().__init__(why)
        self.missing = missing


class _BusyError(OSError):
    """Other processes meet at this port."""


def meet(rank: int, size: int, job: str, address: str, port: int, patience: timedelta) -> Sockets:
    """Connect all processes.

    The first one listens at `address` and `port`. `job` tells the processes of two launches apart. Raise OSError if not
    all come within `patience`.
    """
    end = _after(patience)
    if rank:
        greeting = json.dumps({"rank": rank, "size": size, "job": job}).encode()
        return Sockets(rank, size, {0: _connection(greeting, address, port, end)})
    with _listener(address, port, size) as listener:
        return Sockets(rank, size, _gathered(listener, size, job, end))


def _listener(address: str, port: int, size: int) -> socket.socket:
    if address.startswith(ABSTRACT):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_abstract(address))
        listener.listen(size)
        return listener
    if address in _LOOPBACK:
        return socket.create_server((_LOOPBACK[0], port), backlog=size)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", port), backlog=size)


def _abstract(address: str) -> str:
    return address.replace(ABSTRACT, "\0", 1)


def connect(address: str, port: int, end: float) -> socket.socket:
    """Wait until the first process listens. Raise ConnectionError at `end`, a time of `time.monotonic`."""
    while True:
        try:
            return _connected(address, port)
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(f"nothing listens there: {error}") from None
        time.sleep(_RETRY)


def _connected(address: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as at_an_error:
        if address.startswith(ABSTRACT):
            first = at_an_error.enter_context(socket.socket(socket.AF_UNIX))
            first.connect(_abstract(address))
        else:
            first = at_an_error.enter_context(socket.create_connection((address, port), _ATTEMPT))
            if first.getsockname() == first.getpeername():  # Linux may choose the wanted port for this side
                raise ConnectionError("this process reached itself")
        at_an_error.pop_all()
    return first


def _check_user(peer: socket.socket) -> None:
    """Raise ConnectionError for another user's process. A name on one machine has no file permissions."""
    if peer.family == socket.AF_UNIX:
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            raise ConnectionError(f"a process of user {user} is there")


def _connection(greeting: bytes, address: str, port: int, end: float) -> socket.socket:
    while True:
        first = connect(address, port, end)
        with contextlib.ExitStack() as at_an_error:
            at_an_error.callback(first.close)
            try:
                _check_user(first)
                _send(first, greeting)
                # A second attempt would look like a second process of the same rank, so the first one gets all time.
                _receive(first, end + _GREETING.total_seconds())
            except _EndError:
                raise
            except OSError as error:
                if time.monotonic() > end:
                    raise ConnectionError(f"something else listens there: {error}") from None
            else:
                _receive(first, end + _GREETING.total_seconds())  # when all have come
                at_an_error.pop_all()
                return first
        time.sleep(_RETRY)


def _gathered(listener: socket.socket, size: int, job: str, end: float) -> dict[int, socket.socket]:
    """Return the connections by rank once all have come, otherwise send the reason."""
    peers: dict[int, socket.socket] = {}
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(peers) < size - 1:
                left = end - time.monotonic()
                ready = [key.data for key, _ in selector.select(left)] if left > 0 else []
                ended = [rank for rank in ready if rank is not None]
                if ended:
                    raise ConnectionError(f"rank {ended[0]} ended before all had come")
                if not ready:
                    absent = ", ".join(map(str, [rank for rank in range(1, size) if rank not in peers][:8]))
                    raise ConnectionError(f"of {pluralize(size, 'rank')} did not come: {absent}")
                if (came := _greeted(listener, size, job, peers)) is not None:
                    selector.register(peers[came], selectors.EVENT_READ, came)
        for peer in peers.values():
            _send(peer, b"")
    except BaseException as error:
        for peer in peers.values():
            with contextlib.suppress(OSError):
                _send(peer, _dump([], str(error) or type(error).__name__), _END)
            peer.close()
        raise
    return dict(sorted(peers.items()))


def _greeted(listener: socket.socket, size: int, job: str, peers: dict[int, socket.socket]) -> int | None:
    """Add a connection to `peers` and return its rank. Close a foreign one."""
    peer, _ = listener.accept()
    try:
        _check_user(peer)
        found = json.loads(_receive(peer, _after(_GREETING), _MAX_GREETING))
        rank, why = found["rank"], ""
        if found["job"] != job:
            _send(peer, b"", _BUSY)
        elif found["size"] != size:
            why = f"rank 0 is one of {pluralize(size, 'process')}, and rank {rank} one of {found['size']}"
        elif rank in peers or rank not in range(1, size):
            why = f"two processes are rank {rank}"
        else:
            _send(peer, b"")
            peers[rank] = peer
            return int(rank)
        _send(peer, _dump([], why), _END)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    peer.close()
    return None


def _dump(missing: list[int], why: str) -> bytes:
    return json.dumps([missing, why]).encode()


def _after(wait: timedelta) -> float:
    return time.monotonic() + wait.total_seconds()


def _send(peer: socket.socket, message: bytes, kind: bytes = _DATA) -> None:
    peer.settimeout(SILENCE.total_seconds())
    peer.sendall(_HEADER.pack(_MAGIC, kind, len(message)) + message)


def _receive(peer: socket.socket, end: float, at_most: int | None = None) -> bytes:
    """Raise _EndError for the other side's last message, and OSError if none comes before `end`."""
    magic, kind, length = _HEADER.unpack(_exactly(peer, _HEADER.size, end))
    if magic != _MAGIC or (at_most is not None and length > at_most):
        raise ConnectionError("the other side does not speak like ckpt")
    message = _exactly(peer, length, end)
    if kind == _END:
        raise _EndError(*json.loads(message))
    if kind == _BUSY:
        raise _BusyError("other processes meet there")
    return message


def _exactly(peer: socket.socket, length: int, end: float) -> bytes:
    parts, left, wait = [], length, end - time.monotonic()
    while left:
        peer.settimeout(max(end - time.monotonic(), _LEAST))
        try:
            part = peer.recv(min(left, 1 << 20))
        except TimeoutError:
            raise ConnectionError(f"no message within {wait:.0f} s") from None
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
