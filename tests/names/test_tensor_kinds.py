"""`converters/names/transformers/tensor_kinds.py`: buffers and float32 tensors of transformers' own classes."""

from __future__ import annotations

import pytest
import torch

from ckpt.plan.checkpoint import TRANSFORMERS, WEIGHT, Checkpoint
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ckpt.plan.tensors import Extent, Tensor, Whole
from converters.names.transformers import tensor_kinds
from tests.support import architectures

_TYPES = (
    *("deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "hunyuan_v1_moe", "lfm2_moe"),
    *("llama", "minimax_m2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_moe", "solar_open"),
    *("llava", "qwen2_vl", "qwen3_vl"),
)


def _checkpoint(model: torch.nn.Module, config: dict[str, object]) -> Checkpoint:
    extent = Extent.contiguous("none", 0, FLOAT32, ())
    tensors = {(name, WEIGHT): Tensor(name, WEIGHT, FLOAT32, (), Whole(extent)) for name in model.state_dict()}
    return Checkpoint("none", "dcp", tensors, (), namespace=TRANSFORMERS, config=config)


@pytest.mark.parametrize("model_type", _TYPES)
def test_kinds_are_the_class_s(model_type: str) -> None:
    config = architectures.tiny_config(model_type)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = architectures.model_class(config)(config)
    finally:
        torch.set_default_dtype(dtype)
    checkpoint = _checkpoint(model, config.to_dict())
    state = model.state_dict()
    buffers = {name for name, one in model.named_buffers() if name in state and one.is_floating_point()}
    assert tensor_kinds.is_known(checkpoint)
    assert tensor_kinds.buffers(checkpoint) == buffers

    def kept(theirs: torch.dtype, ours: DType) -> None:
        plan = model._get_dtype_plan(theirs)
        fixed = {name for name in state if any(pattern in name for pattern in plan)}
        fixed |= {name for name, one in state.items() if one.dtype == torch.float32}
        assert tensor_kinds.float32(checkpoint, ours) | buffers == fixed | buffers

    kept(torch.bfloat16, BFLOAT16)
    kept(torch.float16, FLOAT16)
    assert not tensor_kinds.float32(checkpoint, FLOAT32)
