"""EETQ: int8.

Source: transformers 5.23 `integrations/eetq.py`.
"""

from __future__ import annotations

from converters.quantized.scheme import FLOATS, INT8, WEIGHT, Method, Part, Scheme, Settings


def _eetq(_: Settings) -> list[Scheme]:
    scales = Part(FLOATS, lambda plain: [(plain[0],)])
    return [Scheme(WEIGHT, {WEIGHT: Part(INT8), "{w}_scales": scales}, lambda packed: packed[::-1])]


METHOD = Method(("eetq",), _eetq, packages=("kernels",))
