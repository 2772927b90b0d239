"""`ckpt/commands/merge_lora/arithmetic.py`: a scaled product is added with the bits of PEFT's own merge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt.commands.merge_lora import arithmetic
from tests.support.adapters import same

ROWS, COLUMNS, RANK = 40, 24, 3
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
#: Largest absolute values of both factors: subnormal products, usual ones, and products that scaling makes infinite.
SIZES = {"subnormal": 1e-22, "usual": 0.1, "overflowing": 9e18}


def random_bits(dtype: torch.dtype) -> torch.Tensor:
    """Return a weight with every kind of number. Its first row is minus the largest, its second zero."""
    limits = torch.iinfo(BITS[dtype])
    weight = torch.randint(limits.min, limits.max, (ROWS, COLUMNS), dtype=BITS[dtype]).view(dtype)
    weight[0], weight[1] = torch.finfo(dtype).min, 0
    return weight


def merged_by_peft(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    from peft import LoraConfig, get_peft_model

    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    config = LoraConfig(r=RANK, lora_alpha=scaling * RANK, target_modules=["layer"])
    model = get_peft_model(nn.ModuleDict({"layer": layer}), config)
    adapted = model.get_submodule("base_model.model.layer")
    assert adapted.scaling["default"] == scaling
    adapted.lora_A["default"].weight.data, adapted.lora_B["default"].weight.data = a.clone(), b.clone()
    merged: torch.Tensor = model.merge_and_unload().get_submodule("layer").weight.data
    return merged


def differing_scalings(dtype: torch.dtype, size: float) -> list[float]:
    torch.manual_seed(0)
    wide = arithmetic.adapter_dtype(dtype)
    a, b = ((torch.rand(shape, dtype=wide) + 1) * size / 2 for shape in ((RANK, COLUMNS), (ROWS, RANK)))
    found = []
    for scaling in (1.0, 2.0, 8.0, 0.5, 7 / 3):
        weight = random_bits(dtype)
        expected = merged_by_peft(weight, a, b, scaling)
        merged = arithmetic.merge_linear(weight.clone(), a, b, None, scaling=scaling, transposed=False)
        if not same(merged, expected):
            found.append(scaling)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_scaling_has_pefts_bits(dtype: torch.dtype, size: str) -> None:
    assert differing_scalings(dtype, SIZES[size]) == []


@pytest.mark.parametrize(("size", "differing"), [("subnormal", 0.5), ("usual", 7 / 3), ("overflowing", 2.0)])
def test_scaling_that_rounds_needs_its_own_pass(size: str, differing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_scales_exactly", lambda *_: True)
    assert differing in differing_scalings(torch.float32, SIZES[size])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scaling", "value", "is_exact"),
    [
        *((1.0, 1.0, True), (2.0, 1.0, True), (0.5, 1.0, False), (3.0, 1.0, False), (0.0, 1.0, False)),
        *((-2.0, 1.0, False), (2.0, 1e19, False), (1.0, NAN, False), (1.0, INF, False), (INF, 1.0, False)),
    ],
)
def test_scaling_by_a_power_of_two_is_exact(scaling: float, value: float, is_exact: bool) -> None:
    factors = torch.full((2, 4), value), torch.full((4, 2), value)
    assert arithmetic._scales_exactly(*factors, scaling) == is_exact
