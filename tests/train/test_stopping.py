"""Signals to save and end a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from train import stopping


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in stopping.EXIT_CODES}
    monkeypatch.setattr(stopping, "_interruptible", {})
    stopping.listen()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stopping.EXIT_CODES)
def test_a_signal_that_comes_while_the_ranks_ask_is_heard_the_next_time(
    listening: None, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It was lost, and the run continued."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_: os.kill(os.getpid(), number))
    assert not stopping.stop_requested()
    assert stopping.exit_code() == 0
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    assert stopping.stop_requested()
    monkeypatch.setattr("train.launch.is_first", lambda: True)
    assert stopping.exit_code() == stopping.EXIT_CODES[number]


def test_a_signal_of_another_rank_is_heard(listening: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(tensor: Any, *_: Any) -> None:
        tensor.fill_(int(signal.SIGUSR1))

    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr("train.launch.is_first", lambda: False)
    assert stopping.stop_requested() and stopping.exit_code() == 75
