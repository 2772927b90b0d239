"""Stand-ins for Transformer Engine and fla modules used by megatron-core's hybrids, which need a GPU.

The splitting of packed layers, convolutions, gates, and the gated delta rule in torch are megatron-core's own.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm import gated_delta_net as delta

    class Provider(LocalSpecProvider):  # type: ignore[misc]
        def column_parallel_layer_norm_linear(self) -> type:
            return normed_linear()

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def layer_norm(self, rms_norm: bool = True, for_qk: bool = False) -> type:
            return super().layer_norm(rms_norm=True, for_qk=for_qk)

    places: list[tuple[Any, dict[str, Any]]] = [
        *((module, {"TESpecProvider": Provider}) for module in (variants, gpt_layer_specs) if not module.HAVE_TE),
        (delta, {"HAVE_FLA": True, "l2norm": _l2norm, "chunk_gated_delta_rule": delta.torch_chunk_gated_delta_rule}),
    ]
    with contextlib.ExitStack() as stack:
        for module, stand_ins in places:
            stack.enter_context(mock.patch.multiple(module, create=True, **stand_ins))
        yield


@functools.cache
def normed_linear() -> type:
    """Return a linear layer class with a norm in front, named like in Transformer Engine."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
            super().__init__(input_size, output_size, config=config, **more)
            self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))
            if not config.layernorm_zero_centered_gamma:
                self.layer_norm_weight.data.fill_(1.0)
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            for name in [name for name in self._parameters if name != "layer_norm_weight"]:
                self._parameters[name] = self._parameters.pop(name)  # after the norm, like Transformer Engine

        def forward(self, input_: torch.Tensor, *args: Any, **more: Any) -> Any:
            weight = self.layer_norm_weight + float(self.config.layernorm_zero_centered_gamma)
            normed = functional.rms_norm(input_, weight.shape, weight, self.config.layernorm_epsilon)
            return super().forward(normed, *args, **more)

    return NormedLinear


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalize each head to length 1, like fla.modules.l2norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
