"""`ckpt` with one signal to one rank: use `-m tests.support.dying KILL RANK MARK ...` for `ckpt ...`.

The process signals itself (KILL, STOP) after its first journal entry and leaves the file MARK.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.__main__ import main
from ckpt.base import progress
from ckpt.move.journal import Journal
from ckpt.processes import launch


def die_behind(add: Any, number: signal.Signals, mark: Path) -> Any:
    def add_and_die(journal: Journal, name: str, digests: Mapping[Any, str]) -> None:
        add(journal, name, digests)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), number)

    return add_and_die


if __name__ == "__main__":
    number, rank, mark = signal.Signals[f"SIG{sys.argv.pop(1)}"], int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    start = launch.launch()
    if start is not None and start.rank == rank and not mark.exists():
        Journal.add = die_behind(Journal.add, number, mark)  # type: ignore[method-assign]
    progress._EVERY = 1.0
    main()
