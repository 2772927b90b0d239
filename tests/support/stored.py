"""A folder's tensors, read by the safetensors library."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from tests.support.engines import raw


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every tensor in a folder, read by the safetensors library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: raw(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found
