"""Shapes of optimizer states: names of states shaped like their parameter, and the check.

Only plain tensors with real numbers are compared with the parameter. Quantized states have their own checks. Sums of
rows and columns (Adafactor, CAME) or means of blocks (Adam-mini) have other names. A parameter with an object among its
states, such as GaLore's or APOLLO's projection, is trained in another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import counted
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import MASTER
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Shape
from converters.quantized.states import understood

#: States with a value per parameter element in every known optimizer, except optimizers with a single number.
PER_ELEMENT = frozenset(
    {
        *(MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_diff", "exp_inf"),
        *("momentum_buffer", "square_avg", "grad_avg"),
    }
)


def must_fit(name: str, shape: Shape) -> bool:
    """Return True if a state with this name and shape must have the parameter's shape."""
    return prod(shape) == 0 or (name in PER_ELEMENT and prod(shape) > 1)


def per_element(states: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of one parameter's states that must equal the parameter's shape."""
    plain = understood(states)
    if any(isinstance(value, Mapping | Record) for value in plain.values()):
        return {}
    return {
        name: value.shape
        for name, value in plain.items()
        if isinstance(value, StoredTensor) and value.extent.dtype in CAST_SOURCES and must_fit(name, value.shape)
    }


def check_shape(fqn: str, name: str, found: Shape, expected: Shape, path: str) -> None:
    """Raise CorruptError if the state `name` of `fqn` does not have its parameter's `expected` shape."""
    if found != expected:
        what = f"{name} does not have the shape of its parameter"
        raise CorruptError(what, path=path, fqn=fqn, expected=str(list(expected)), found=str(list(found)))


def check_has_elements(states: Mapping[Any, Mapping[str, Any]], parameters: Mapping[str, Shape], path: str) -> None:
    """Raise CorruptError if more parameters have empty states than the model has empty parameters.

    This needs no names. A script that saves `optimizer.state_dict()` under ZeRO-3 or FSDP leaves such states.
    """
    empty = [key for key, values in states.items() if any(prod(shape) == 0 for shape in per_element(values).values())]
    if len(empty) > sum(prod(shape) == 0 for shape in parameters.values()):
        what = "states of the optimizer have no elements"
        found = f"states without elements for {counted(len(empty), 'parameter')}, the first is {empty[0]}"
        raise CorruptError(what, path=path, expected="the shapes of the parameters", found=found)
