"""AutoRound in the layouts of GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import replace

from converters.quantized.methods import awq, gptq
from converters.quantized.scheme import Method, Scheme, Settings


def _auto_round(settings: Settings) -> list[Scheme] | None:
    """Return the schemes for GPTQ and AWQ. Other packing formats are other methods' layouts."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    if "gptq" not in packing and "awq" not in packing:
        return None
    schemes = [*(gptq.METHOD.schemes({}) or []), *(awq.METHOD.schemes({}) or [])]
    return [replace(scheme, dequantize=None) for scheme in schemes]


METHOD = Method(
    ("auto-round", "intel/auto-round"),
    _auto_round,
    unrecorded=lambda: _auto_round({}) or (),
    takes_plain=True,
    packages=("auto-round",),
)
