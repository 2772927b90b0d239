"""`converters/megatron/remainders.py`: masters from a bf16 parameter and 16 more bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt.errors import CorruptError, NotFoundError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Key
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.tensors import Extent, Tensor, Whole
from ckpt.views.lazy import LazyTensor
from converters.megatron import remainders

FQN = "decoder.layers.0.mlp.linear_fc2.weight"
SHAPE = (5, 64)


def stored(path: Path, role: str, tensor: torch.Tensor) -> dict[Key, Tensor]:
    path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    shape = tuple(tensor.shape)
    return {(FQN, role): Tensor(FQN, role, dtype, shape, Whole(Extent.contiguous(str(path), 0, dtype, shape)))}


def cut(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper half, plus one if the lower half is negative as int16, and the lower half, like the kernel."""
    lower, upper = masters.view(torch.int16).reshape(*masters.shape, 2).unbind(-1)
    return torch.where(lower < 0, upper + 1, upper).view(torch.bfloat16), lower


def test_every_bit_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.randint(-(1 << 31), 1 << 31, SHAPE, generator=torch.Generator().manual_seed(0))
    edges = [0, 0x8000, 0x7FFF, 0xFFFF, 0x3F800000, 0x3F808000, 0x7F7FFFFF, -1, -(1 << 31), 0x00008000]
    drawn[0, : len(edges)] = torch.tensor(edges)
    masters = drawn.to(torch.int32).view(torch.float32)
    weight, lower = cut(masters)
    tensors = stored(tmp_path / "w", WEIGHT, weight) | stored(tmp_path / "m", MASTER, lower)
    monkeypatch.setattr(remainders, "_BLOCK", 128)
    found, computed = remainders.with_masters(tensors, tmp_path)
    assert len(computed) == 3  # two rows, two rows and one
    whole = LazyTensor(found[FQN, MASTER], computed)[...]
    assert torch.equal(whole.view(torch.int32), masters.view(torch.int32))
    assert found[FQN, WEIGHT] is tensors[FQN, WEIGHT]


def test_lower_halves_alone_are_damage(tmp_path: Path) -> None:
    lower = stored(tmp_path / "m", MASTER, torch.zeros(SHAPE, dtype=torch.int16))
    with pytest.raises(CorruptError, match="lack the parameter"):
        remainders.with_masters(lower, tmp_path)
    other = stored(tmp_path / "w", WEIGHT, torch.zeros(SHAPE))
    with pytest.raises(CorruptError, match="lack the parameter"):
        remainders.with_masters(lower | other, tmp_path)


def test_only_masters_in_fp32_of_a_model_in_bf16_are_cut(tmp_path: Path) -> None:
    aware = {"use_precision_aware_optimizer": True, "bf16": True}
    with pytest.raises(NotFoundError, match="only 16 bits per master"):
        remainders.refuse_gathered(aware, tmp_path)
    for args in ({"bf16": True}, aware | {"bf16": False}, aware | {"main_params_dtype": torch.float16}):
        remainders.refuse_gathered(args, tmp_path)
    remainders.refuse_gathered(aware | {"store_param_remainders": False}, tmp_path)
