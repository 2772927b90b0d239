"""Run folders in the state their trainers leave."""

from __future__ import annotations

import os
import re
from pathlib import Path


def in_the_order_of_steps(folder: Path) -> Path:
    """Set the modification times of a trainer's files, lost in a clone: steps in order, then the rest."""
    for path in folder.rglob("*"):
        step = re.search(r"/(?:checkpoint|step)-(\d+)(?:/|$)", path.as_posix())
        seconds = 1_700_000_000 + (int(step[1]) if step else 1_000_000)
        os.utime(path, (seconds, seconds))
    return folder
