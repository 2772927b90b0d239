"""Options for writing GGUF."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

TYPES = ("f32", "f16", "bf16", "q8_0", "mxfp4")


@dataclass(frozen=True)
class GgufOptions:
    quantize: str = option(
        "Type of the weights. Norms and biases are f32, like in llama.cpp. mxfp4 is for experts only.",
        choices=TYPES,
        metavar="TYPE",
    )
