"""`ckpt`, whose process of one rank is killed once: `-m tests.support.dying RANK MARK ...` for `ckpt ...`.

It dies as by `kill -9`, when the first of what it has written is in the journal, and leaves the file MARK.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt import launch
from ckpt.__main__ import main
from ckpt.move.journal import Journal


def die_behind(add: Any, mark: Path) -> Any:
    def add_and_die(journal: Journal, name: str, digests: Mapping[Any, str]) -> None:
        add(journal, name, digests)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return add_and_die


if __name__ == "__main__":
    rank, mark = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    start = launch.launch()
    if start is not None and start.rank == rank and not mark.exists():
        Journal.add = die_behind(Journal.add, mark)  # type: ignore[method-assign]
    main()
