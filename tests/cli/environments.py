"""Environments with some installed distributions and their requirements, linked, so nothing is downloaded."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.places import REPOSITORY


def closure(*names: str) -> dict[str, metadata.Distribution]:
    """Return the named distributions and everything they require without extras."""
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        key = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if key in found:
            continue
        found[key] = metadata.distribution(key)
        for text in found[key].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def environment(folder: Path, *names: str) -> Path:
    """Make an environment with ckpt, its requirements and the distributions `names`, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    here = Path(sysconfig.get_path("purelib"))
    required = closure("ckpt-toolkit", *names)
    required.pop("ckpt-toolkit")
    for distribution in required.values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)
    for package in ("ckpt", "converters"):
        (site / package).symlink_to(REPOSITORY / package)
    return folder / "bin" / "python"
