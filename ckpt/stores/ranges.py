"""Ranges of an object in a store. Small ones are cached in pages.

Sequential reads are fetched ahead in the background, in growing windows.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

from ckpt.move.source import DIRECT

_PAGE = 256 << 10  # minimum bytes per fetch
_PAGES = 16  # pages per window
_PART = 8 << 20  # bytes per request
_KEPT = 128 << 20  # bytes for all objects together
_NUM_FETCHERS = 16  # threads that fetch ahead

Fetch = Callable[[int, int], memoryview]


class Ranges:
    """A thread-safe reader for an object. It passes on errors from `fetch` without a retry.

    Turn `reads_ahead` off if `fetch` itself reads from other objects: it needs free threads.
    """

    def __init__(self, size: int, fetch: Fetch, *, reads_ahead: bool = True) -> None:
        self.size = size
        self._reads_ahead = reads_ahead
        self._fetch = fetch
        self._num_pages = -(-size // _PAGE)

    def read_into(self, offset: int, *buffers: memoryview) -> int:
        """Fill `buffers`. Return the number of available bytes."""
        done = 0
        for part in self.parts(offset, offset + sum(map(len, buffers))):
            buffers = _scatter(part, buffers)
            done += len(part)
        return done

    def fetched(self, start: int, stop: int) -> memoryview:
        """Return the bytes, fewer at the end, without copying or caching."""
        stop = min(self.size, stop)
        return self._fetch(start, stop) if start < stop else memoryview(b"")

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        stop = min(self.size, stop)
        while start < stop:
            for part in self._parts(start, stop):
                yield part
                start += len(part)

    def _parts(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes, or only the first of them."""
        if stop - start >= DIRECT:
            cuts = [*range(start, stop, _PART), stop]
            ahead = [_pool(os.getpid()).submit(self._fetch, *cut) for cut in pairwise(cuts[1:])]
            return [self._fetch(cuts[0], cuts[1]), *(one.result() for one in ahead)]
        page = start // _PAGE
        window = self._window(page, -(-stop // _PAGE))
        at = window.first * _PAGE
        return [window.fetched.result()[start - at : stop - at]]

    def _window(self, page: int, stop: int) -> _PageWindow:
        """Return the window with `page`. It extends to `stop`, or further in a sequential read."""
        mine = None
        with _kept.lock:
            run = _kept.run(self, page)
            window = _kept.get(self, page)
            if window is None:
                last = min(self._num_pages, max(stop, page + min(_PAGES, 2 * run)), page + max(_PAGES, stop - page))
                mine = window = self._add(page, last)
            ahead = None
            is_read_on = self._reads_ahead and run >= _PAGES // 2 and window.stop < self._num_pages
            if is_read_on and _kept.get(self, window.stop) is None:
                ahead = self._add(window.stop, min(self._num_pages, window.stop + _PAGES))
        if ahead is not None:
            _pool(os.getpid()).submit(self._fill, ahead)
        if mine is not None:
            self._fill(mine)
        return window

    def _add(self, first: int, stop: int) -> _PageWindow:
        stop = next((page for page in range(first + 1, stop) if _kept.get(self, page) is not None), stop)
        window = _PageWindow(first, stop)
        _kept.add(self, window)
        return window

    def _fill(self, window: _PageWindow) -> None:
        try:
            data = self._fetch(window.first * _PAGE, min(self.size, window.stop * _PAGE))
        except BaseException as error:
            with _kept.lock:
                _kept.drop(self, window)
            window.fetched.set_exception(error)
        else:
            window.fetched.set_result(data)


class _PageWindow:
    def __init__(self, first: int, stop: int) -> None:
        self.first, self.stop = first, stop
        self.fetched: Future[memoryview] = Future()


class _PageCache:
    """Cache of pages, least recently used. Callers must hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._windows: OrderedDict[tuple[Ranges, int], _PageWindow] = OrderedDict()

    def get(self, of: Ranges, page: int) -> _PageWindow | None:
        window = self._windows.get((of, page))
        if window is not None:
            self._windows.move_to_end((of, page))
        return window

    def run(self, of: Ranges, page: int) -> int:
        """Return the number of cached pages directly before this one, up to the window size."""
        return next((n for n in range(_PAGES) if (of, page - n - 1) not in self._windows), _PAGES)

    def add(self, of: Ranges, window: _PageWindow) -> None:
        self._windows.update(((of, page), window) for page in range(window.first, window.stop))
        while len(self._windows) * _PAGE > _KEPT:
            self._windows.popitem(last=False)

    def clear(self) -> None:
        self._windows.clear()

    def drop(self, of: Ranges, window: _PageWindow) -> None:
        for page in range(window.first, window.stop):
            if self._windows.get((of, page)) is window:
                del self._windows[of, page]


_kept = _PageCache()


def forget() -> None:
    with _kept.lock:
        _kept.clear()


@lru_cache(1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads. A forked child gets its own."""
    return ThreadPoolExecutor(_NUM_FETCHERS, "ckpt-fetch")


def _scatter(data: memoryview, buffers: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
    """Return the remaining buffers."""
    while data and buffers:
        first, *rest = buffers
        count = min(len(first), len(data))
        first[:count] = data[:count]
        data = data[count:]
        buffers = (first[count:], *rest) if count < len(first) else tuple(rest)
    return buffers
