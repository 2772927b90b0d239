"""MLX.

Source: mlx 0.30 `nn/layers/quantized.py`.
"""

from __future__ import annotations

from converters.quantized.scheme import (
    E8M0,
    F8,
    FLOATS,
    UINT32,
    WEIGHT,
    Method,
    Part,
    Scheme,
    Settings,
    number,
    per_group,
)


def _mlx(settings: Settings) -> list[Scheme]:
    bits, group = number(settings, "bits") or 4, number(settings, "group_size") or 64
    is_affine = settings.get("mode", "affine") == "affine"
    scales = {"{m}scales": Part(FLOATS if is_affine else (*E8M0, *F8), per_group(1, group))}
    biases = {"{m}biases": Part(FLOATS, per_group(1, group))} if is_affine else {}
    parts = {WEIGHT: Part(UINT32), **scales, **biases}
    return [Scheme(WEIGHT, parts, lambda packed: (*packed[:-1], packed[-1] * 32 // bits))]


METHOD = Method(("mlx",), _mlx, takes_plain=True, own_settings="")
