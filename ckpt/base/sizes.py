"""Byte counts with units."""

from __future__ import annotations

import re
from decimal import Decimal

from ckpt.base.errors import UsageError

_UNITS = {"B": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", 1)
    for name, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024), (letter, 1000))
}


def parse_size(text: str | int) -> int:
    """Return the bytes in `5GB`, `1.5 GB` or `100B` (decimal), `512MiB` (binary), or a positive int."""
    if isinstance(text, int) and text > 0:
        return text
    text = str(text)
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match and not unit and Decimal(match[1]):
        hint = " or ".join(f"{match[1]}{name}" for name in ("GB", "MB", "B"))
        raise UsageError("a size needs a unit", expected="for example 5GB or 512MB", found=repr(text), hint=hint)
    size = int(Decimal(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size <= 0:
        raise UsageError("this is not a size", expected="for example 5GB or 512MB", found=repr(text))
    return size


def show_size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"
