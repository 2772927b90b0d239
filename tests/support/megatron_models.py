"""megatron-core's BERT and Mamba from a checkpoint's arguments; stand-ins replace mamba-ssm, which needs a GPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from train.megatron import engine
from train.megatron.stand_ins import normed_linear


def build_chunks(args: Any, transformer: Any) -> list[Any]:
    """Build this rank's chunks from the arguments."""
    if getattr(args, "hybrid_override_pattern", None) is not None:
        return engine.build_chunks(args, transformer, _mamba_model)
    if getattr(args, "bert_binary_head", False):
        return engine.build_chunks(args, transformer, _bert_model)
    return engine.build_chunks(args, transformer)


def _bert_model(args: Any, transformer: Any, **given: Any) -> Any:
    """Build a BERT chunk with a masked-token head and a sentence-pair head."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(transformer, 2, bert_layer_local_spec, **given)


def _mamba_model(args: Any, transformer: Any, vp_stage: None, **given: Any) -> Any:
    """Build this rank's part in a hybrid Mamba model."""
    spec = _mamba_spec(args.num_experts)
    from megatron.core.models.mamba import MambaModel

    return MambaModel(
        transformer,
        spec,
        hybrid_override_pattern=args.hybrid_override_pattern,
        position_embedding_type=args.position_embedding_type,
        **given,
    )


@functools.cache
def _have_mamba() -> None:
    """Make megatron-core's Mamba use the stand-ins: its module imports Triton, but only inference needs it."""
    if importlib.util.find_spec("triton") is None:
        inference = "megatron.core.inference.contexts.attention_context.triton"
        sys.modules[f"{inference}.tensor_ops"] = mock.MagicMock()
    from megatron.core.ssm import mamba_block, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = _gated_norm()
    mamba_mixer.mamba_chunk_scan_combined = _scan
    mamba_block.TENorm = WrappedTorchNorm


def _mamba_spec(num_experts: int | None) -> Any:
    """Return a MambaModel's layer specs, after models/mamba/mamba_layer_specs.py."""
    _have_mamba()
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    linear, add = normed_linear(), get_bias_dropout_add
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=linear, out_proj=RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=linear, linear_fc2=RowParallelLinear))
    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add)),
        "attention_layer": ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=add)
        ),
        "mlp_layer": ModuleSpec(MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=add)),
    }
    if num_experts:
        moe = get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)
        layers["moe_layer"] = ModuleSpec(
            MoETransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=add),
        )
    return ModuleSpec(MambaStack, submodules=MambaStackSubmodules(**layers))


@functools.cache
def _gated_norm() -> type:
    """Return mamba_ssm's grouped, gated RMSNorm with megatron-core's extension."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class GatedNorm(torch.nn.Module):
        def __init__(self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, **more: Any) -> None:
            super().__init__()
            self.eps, self.group_size = eps, group_size
            self.weight = torch.nn.Parameter(torch.ones(size, **more))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            gated = (x.float() * functional.silu(gate.float())).unflatten(-1, (-1, self.group_size))
            normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
            return (normed.flatten(-2) * self.weight).to(x.dtype)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            state = self.state_dict(prefix="", keep_vars=True)
            groups = {"tp_group": get_tensor_model_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
            return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)

    return GatedNorm


def _scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int, **more: Any
) -> torch.Tensor:
    """Compute mamba_ssm's mamba_chunk_scan_combined, one sequence element after the other."""
    heads = x.shape[2]
    steps = functional.softplus(dt.float() + more["dt_bias"])
    into, out = (one.float().repeat_interleave(heads // one.shape[2], dim=2) for one in (b, c))
    state = x.new_zeros(x.shape[0], heads, x.shape[3], b.shape[3], dtype=torch.float32)
    found = []
    for at in range(x.shape[1]):
        step = steps[:, at, :, None, None]
        state = state * torch.exp(step * a[:, None, None]) + step * x[:, at, ..., None] * into[:, at, :, None]
        found.append((state * out[:, at, :, None]).sum(-1))
    return (torch.stack(found, 1) + more["D"][:, None] * x).to(x.dtype)
