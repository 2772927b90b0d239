"""Stand-ins for what megatron-core takes from Transformer Engine and fla for a gated delta net, which need a GPU.

Of Transformer Engine there is the linear layer that holds the norm in front of it, and of fla the norm of queries and
keys; all else is megatron-core's own, its gated delta rule in torch included.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Has megatron-core build layers of Transformer Engine's kind from its own ones while open."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm import gated_delta_net as delta
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
        """A linear layer with the norm in front of it, under the names that Transformer Engine's has."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
            super().__init__(input_size, output_size, config=config, **more)
            self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))
            if not config.layernorm_zero_centered_gamma:
                self.layer_norm_weight.data.fill_(1.0)
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, input_: torch.Tensor, *args: Any, **more: Any) -> Any:
            weight = self.layer_norm_weight + float(self.config.layernorm_zero_centered_gamma)
            normed = torch.nn.functional.rms_norm(input_, weight.shape, weight, self.config.layernorm_epsilon)
            return super().forward(normed, *args, **more)

    class Provider(LocalSpecProvider):  # type: ignore[misc]
        def column_parallel_layer_norm_linear(self) -> type:
            return NormedLinear

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def layer_norm(self, rms_norm: bool = True, for_qk: bool = False) -> type:
            return super().layer_norm(rms_norm=True, for_qk=for_qk)

    with contextlib.ExitStack() as stack:
        for module in (variants, gpt_layer_specs):
            stack.enter_context(mock.patch.object(module, "TESpecProvider", Provider, create=True))
        kernels = {"HAVE_FLA": True, "l2norm": _l2norm, "chunk_gated_delta_rule": delta.torch_chunk_gated_delta_rule}
        for name, stand_in in kernels.items():
            stack.enter_context(mock.patch.object(delta, name, stand_in, create=True))
        yield


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """fla.modules.l2norm: each head divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
