"""Golden output: a file holds the whole output, so that reviewers see every changed word."""

from __future__ import annotations

import os
from pathlib import Path


def agrees(path: Path, found: str) -> None:
    """Assert that the file `path` contains `found`, or write it there if CKPT_GOLDEN=write is set."""
    if os.environ.get("CKPT_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()
