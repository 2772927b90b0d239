"""Run folders as their trainers left them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def in_the_order_of_steps(folder: Path) -> Path:
    """Give files the times at which a trainer writes them, which a clone loses: steps in order, then the rest."""
    for path in folder.rglob("*"):
        step = re.search(r"/(?:checkpoint|step)-(\d+)(?:/|$)", path.as_posix())
        seconds = 1_700_000_000 + (int(step[1]) if step else 1_000_000)
        os.utime(path, (seconds, seconds))
    return folder
