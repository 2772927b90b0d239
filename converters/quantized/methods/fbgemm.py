"""FBGEMM FP8 in transformers' format.

Source: transformers 5.23 `integrations/fbgemm_fp8.py`.
"""

from __future__ import annotations

from converters.quantized.scheme import F8, F32, WEIGHT, Method, Part, Scheme, Settings, optional, per_output, scalar


def _fbgemm(_: Settings) -> list[Scheme]:
    parts = {WEIGHT: Part(F8), "{w}_scale": Part(F32, per_output)}
    linear = Scheme(WEIGHT, {**parts, "{m}input_scale_ub": optional(F32, scalar)}, tuple, is_stack=False)
    return [linear, Scheme(WEIGHT, {**parts, "{w}_scale": Part(F32)}, tuple, is_stack=True)]


METHOD = Method(("fbgemm_fp8",), _fbgemm, packages=("fbgemm-gpu",))
