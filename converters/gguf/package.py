"""The `gguf` package, imported when something is written."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ckpt.base.errors import UsageError


def package() -> Any:
    """Return the `gguf` module. Raise UsageError if it is not installed."""
    try:
        return import_module("gguf")
    except ImportError:
        what, hint = "writing GGUF needs the gguf package", "pip install 'ckpt-toolkit[gguf]'"
        raise UsageError(what, hint=hint) from None


def quants(number: int) -> Callable[[Any], Any]:
    """Return the function that quantizes float32 rows to the type with this number."""
    kind = package().GGMLQuantizationType(number)
    quantize = import_module("gguf.quants").quantize
    return lambda rows: quantize(rows, kind)
