"""`ckpt/move/threads.py`: jobs shared by several threads, some of them heavy."""

from __future__ import annotations

import dis
import queue
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from ckpt.move import threads
from ckpt.move.threads import Jobs


class TestJobs:
    def test_all_are_taken_once_however_few_heavy_ones_are_done_at_a_time(self) -> None:
        jobs: Jobs[int] = Jobs(4, 2)
        done: list[int] = []
        running, most, lock = [0], [0], threading.Lock()

        def work() -> None:
            for job in jobs:
                heavy = job % 3 == 0
                with lock:
                    running[0] += heavy
                    most[0] = max(most[0], running[0])
                with lock:
                    running[0] -= heavy
                    done.append(job)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(5)]
        for thread in threads:
            thread.start()
        for job in range(3000):
            assert jobs.put(job, is_heavy=job % 3 == 0, timeout=10)
        jobs.close()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert sorted(done) == list(range(3000)) and 1 <= most[0] <= 2

    @pytest.mark.parametrize("is_heavy", [True, False])
    def test_there_is_no_more_room_than_said(self, is_heavy: bool) -> None:
        jobs: Jobs[int] = Jobs(2, 1)
        assert [jobs.put(job, is_heavy=is_heavy, timeout=0) for job in range(3)] == [True, True, False]
        assert jobs.put(3, is_heavy=not is_heavy, timeout=0)
        taken = iter(jobs)
        next(taken)
        assert jobs.put(4, is_heavy=True, timeout=0), "a heavy one is taken first"

    def test_a_second_heavy_one_waits_and_light_ones_do_not(self) -> None:
        jobs: Jobs[str] = Jobs(4, 1)
        first, second = iter(jobs), iter(jobs)
        for job, is_heavy in (("heavy", True), ("heavy 2", True), ("light", False)):
            assert jobs.put(job, is_heavy=is_heavy, timeout=0)
        jobs.close()
        assert [next(first), next(second)] == ["heavy", "light"]
        assert list(second) == [], "who is at a heavy one takes what is left"
        assert list(first) == ["heavy 2"]

    def test_what_is_dropped_is_not_taken(self) -> None:
        jobs: Jobs[int] = Jobs(4, 1)
        jobs.put(1, is_heavy=True, timeout=0)
        jobs.put(2, is_heavy=False, timeout=0)
        jobs.close(drop=True)
        assert list(jobs) == []

    def test_ctrl_c_anywhere_in_put_keeps_no_lock(self) -> None:
        """A kept lock would stop `close` and every consumer for ever."""
        files = {module.__file__ for module in (threads, threading, queue)}
        interrupted = 0
        while self._interrupted(interrupted + 1, files):
            interrupted += 1
        assert interrupted > 20

    def _interrupted(self, number: int, files: set[str | None]) -> bool:
        """Interrupt three `put`s where Python looks for signals for the given time, then close.

        Return False if they end before. Python looks after a call, at a function's start, and at a loop's end.
        """
        jobs: Jobs[int] = Jobs(2, 1)
        consumer = threading.Thread(target=lambda: list(jobs), daemon=True)
        consumer.start()
        left, is_interrupted, before = number, False, dict[FrameType, str]()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= before.get(frame, "").startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
                if not left:
                    raise KeyboardInterrupt
                before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            return trace

        sys.settrace(trace)
        try:
            for job in range(3):
                jobs.put(job, is_heavy=job == 1, timeout=1)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(None)
        closer = threading.Thread(target=jobs.close, daemon=True)
        closer.start()
        for thread in (closer, consumer):
            thread.join(10)
            assert not thread.is_alive(), f"interrupted at {number}"
        return is_interrupted
