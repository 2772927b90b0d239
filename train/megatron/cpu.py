"""Patches to run megatron-core 0.16.1 without a GPU, Transformer Engine or Apex.

docs/training.md lists the patches.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from train.megatron.stand_ins import without_kernels

_CPU = torch.device("cpu")


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (WrappedTorchNorm, "__new__", _norm_by),
        (DotProductAttention, "__init__", _attend_by),
        (DistributedOptimizer, "_set_main_param_and_optimizer_states", _put_by),
        (layers, "reduce_from_tensor_model_parallel_region", _reduce_by),
        (layers, "reduce_scatter_to_sequence_parallel_region", _reduce_by),
    ]
    missing: list[tuple[Any, str, Any]] = []
    if not moe_utils.HAVE_TE:
        # Without Transformer Engine, `te_general_gemm` is undefined, and TELinear is None, so isinstance() fails.
        missing = [(moe_utils, "te_general_gemm", None)]
        missing += [(module, "TELinear", _Absent) for module in (multi_latent_attention, mcore_fsdp_adapter)]
    if not _has_gpu():
        replaced.append((DeviceMesh, "from_group", _mesh_by))
        missing += [(torch.cuda, name, stand_in) for name, stand_in in _CUDA.items()]
        missing += [(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.random.get_rng_state())]
        missing += [(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.random.set_rng_state(state))]
    with contextlib.ExitStack() as stack:
        for owner, name, made_of in replaced:
            stack.enter_context(mock.patch.object(owner, name, made_of(getattr(owner, name))))
        for owner, name, stand_in in missing:
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        if not _has_gpu():
            stack.enter_context(_CudaIsCpu())
        stack.enter_context(without_kernels())
        yield


def numbered_device() -> contextlib.AbstractContextManager[Any]:
    """Give the current device a number: Megatron-FSDP needs it for a name."""
    if _has_gpu():
        return contextlib.nullcontext()
    return mock.patch.object(torch.cuda, "current_device", lambda: 0)


def _has_gpu() -> bool:
    """Return True with a GPU. Tests can fake it here while megatron-core uses the CPU."""
    return torch.cuda.is_available()


def _norm_by(make: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Extend torch's norm with zero-centered weights and the mark for sequence parallelism."""

    def norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.layernorm_zero_centered_gamma = False
        made = make(cls, plain, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            made.__class__ = _CenteredNorm if config.normalization == "LayerNorm" else _CenteredRMSNorm
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    return norm


class _CenteredNorm(torch.nn.LayerNorm):
    """LayerNorm with weights stored minus one, like in Apex and Transformer Engine."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class _CenteredRMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def _reduce_by(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Sum over a group. A group of one returns the tensor itself."""

    def reduced(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        return tensor if group is not None and group.size() == 1 else reduce(tensor, group=group)

    return reduced


def _attend_by(initialize: Callable[..., None]) -> Callable[..., None]:
    """Accept and ignore multi-latent attention's widths: attention reads them off the tensors."""

    def attend(*args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        initialize(*args, **kwargs)

    return attend


def _put_by(put: Callable[..., None]) -> Callable[..., None]:
    """Keep the step, loaded from model_optim_rng.pt, when distrib_optim.pt's states are set. torch's Adam needs it."""

    def put_with_step(optimizer: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        put(optimizer, parameter, {name: state[name] for name in ("step",) if name in state} | tensors)

    return put_with_step


def _mesh_by(make: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
    def mesh(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return make(group, "cpu", *args, **kwargs)

    return mesh


class _Absent:
    """Substitute for a missing class, without instances."""


class _CudaIsCpu(TorchFunctionMode):
    """Mode that makes CUDA tensors on the CPU and reports CUDA in a CPU tensor's type string."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": _cpu_for(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *(_cpu_for(value) if _names_cuda(value) else value for value in args[1:]))
        if getattr(func, "__name__", "") == "all_to_all_single":
            # megatron-core only converts the split sizes to numbers if they come from a GPU.
            sizes = {name: kwargs.get(name) for name in ("output_split_sizes", "input_split_sizes")}
            kwargs = kwargs | {name: size.tolist() for name, size in sizes.items() if torch.is_tensor(size)}
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _cpu_for(device: Any) -> Any:
    return _CPU if _names_cuda(device) or isinstance(device, int) else device


#: Always empty: CPU calls finish before they return.
_STREAM = mock.MagicMock()

_CUDA: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *args: None,
    "empty_cache": lambda: None,
    "Stream": mock.MagicMock,
    "Event": mock.MagicMock,
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": lambda *args: _STREAM,
    "default_stream": lambda *args: _STREAM,
    "manual_seed": lambda seed: torch.random.manual_seed(seed) and None,
    "get_rng_state": lambda *args: torch.random.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.random.set_rng_state(state),
}
