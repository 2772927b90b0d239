"""Tensor subclasses that wrap other tensors and have no own elements: DTensor, torchao."""

from __future__ import annotations

from typing import Any

from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.values import Global, Record
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Shape, contiguous_strides


def wrapper(module: str, name: str, dtype: DType, shape: Shape, state: Any) -> Record:
    """Return a tensor of the subclass `module.name` on the CPU, with `state` as its attributes.

    See torch 2.13's `_tensor.py`, `_reduce_ex_internal`, and `_utils.py`, `_rebuild_wrapper_subclass`.
    """
    kind = Global(module, name)
    layout = Record("torch.serialization", "_get_layout", ("torch.strided",))
    args = (kind, dtype, Size(shape), contiguous_strides(shape), 0, layout, Record("torch", "device", ("cpu",)), False)
    function = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Record("torch._tensor", "_rebuild_from_type_v2", (function, kind, args, state))
