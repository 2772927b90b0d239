"""Output that is compared as a whole with a file, so that a change of a word is seen in review."""

from __future__ import annotations

import os
from pathlib import Path


def agrees(path: Path, found: str) -> None:
    """`found` is what stands in the file `path`; with CKPT_GOLDEN=write in the environment it is written there."""
    if os.environ.get("CKPT_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()
