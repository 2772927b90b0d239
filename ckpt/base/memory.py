"""Free memory."""

from __future__ import annotations

import re
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_SYSTEM = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Return the bytes still free in the system and this process's cgroup, or None."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", _contents(_SYSTEM), re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
    most, used = (_contents(_GROUP / name).strip() for name in ("memory.max", "memory.current"))
    if most.isdecimal() and used.isdecimal():
        cache = re.search(r"^inactive_file (\d+)$", _contents(_GROUP / "memory.stat"), re.MULTILINE)
        limits.append(max(0, int(most) - int(used) + (int(cache[1]) if cache else 0)))
    return min(limits, default=None)


def _contents(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
