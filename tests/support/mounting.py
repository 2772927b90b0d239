"""Check for FUSE, and unmounting."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from ckpt.errors import NotFoundError
from ckpt.views import mount


def no_fuse() -> str:
    """Return why mounting is impossible here, or "" if it is possible."""
    try:
        mount.library()
    except NotFoundError as error:
        return f"{error.what} ({error.hint})"
    if os.geteuid() and not shutil.which("fusermount3") and not shutil.which("fusermount"):
        return "there is no fusermount"
    return ""


def unmount(view: Path) -> None:
    """Unmount with `fusermount3 -u`, or with a fallback if it is missing."""
    for words in (["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]):
        if shutil.which(words[0]):
            subprocess.run([*words, str(view)], check=True)
            break
    while os.path.ismount(view):
        time.sleep(0.05)
