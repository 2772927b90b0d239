"""Check of optimizer states' shapes.

Sums of rows and columns (Adafactor, CAME) or means of blocks (Adam-mini) have other names. A parameter with an object
among its states, such as GaLore's or APOLLO's projection, is trained in another shape.

A state with an unknown name must have its parameter's shape if most parameters like it do: parameters with the same
number of dimensions and the same states. A square matrix proves nothing: Shampoo's preconditioners are square. Sums
that keep their dimensions (SM3) and single numbers (Prodigy, for a parameter of zeros) may be anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import MASTER
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Shape, Tensor
from converters.quantized.states import understood

#: States with a value per element, or a single number.
PER_ELEMENT = frozenset(
    {
        *(MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_diff", "exp_inf"),
        *("momentum_buffer", "square_avg", "grad_avg"),
    }
)


def must_fit(name: str, shape: Shape) -> bool:
    return prod(shape) == 0 or (name in PER_ELEMENT and prod(shape) > 1)


def per_element(states: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: shape for name, shape in plain_shapes(states).items() if must_fit(name, shape)}


def plain_shapes(states: Mapping[str, Any]) -> dict[str, Shape]:
    """Return plain tensors' shapes, or an empty dict if there is an object."""
    plain = understood(states)
    if any(isinstance(value, Mapping | Record) for value in plain.values()):
        return {}
    return {
        name: value.shape
        for name, value in plain.items()
        if isinstance(value, StoredTensor) and value.extent.dtype in CAST_SOURCES
    }


def misshapen(
    tensors: Collection[Tensor], parameters: Mapping[str, Shape], names: Mapping[str, Collection[str]]
) -> Iterator[Tensor]:
    """Yield states that must have their parameter's shape: by name, or if most similar states do.

    `names` has all state names of each parameter.
    """
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        fqn, name = tensor.key
        if fqn in parameters and must_fit(name, tensor.shape) and tensor.shape != parameters[fqn]:
            yield tensor
        elif fqn in parameters:
            alike.setdefault((name, len(parameters[fqn]), frozenset(names[fqn])), []).append(tensor)
    for group in alike.values():
        fit = [tensor for tensor in group if tensor.shape == parameters[tensor.fqn]]
        odd = [tensor for tensor in group if not _may_have(tensor.shape, parameters[tensor.fqn])]
        if 2 * len(fit) > len(group) and sum(map(_is_proof, fit)) > len(odd):
            yield from odd


def _is_proof(tensor: Tensor) -> bool:
    return len(tensor.shape) == 1 or (len(set(tensor.shape)) > 1 and 1 not in tensor.shape)


def _may_have(shape: Shape, parameter: Shape) -> bool:
    """Accept sums that keep their dimensions, and single numbers."""
    is_sum = len(shape) == len(parameter) and all(size in (1, own) for size, own in zip(shape, parameter, strict=True))
    return is_sum or prod(shape) == 1


def check_shape(fqn: str, name: str, found: Shape, expected: Shape, path: str) -> None:
    if found != expected:
        what = f"{name} does not have its parameter's shape"
        raise CorruptError(what, path=path, fqn=fqn, expected=str(list(expected)), found=str(list(found)))


def check_has_elements(states: Mapping[Any, Mapping[str, Any]], parameters: Mapping[str, Shape], path: str) -> None:
    """Raise CorruptError if more parameters have empty states than the model has empty parameters.

    `optimizer.state_dict()` under ZeRO-3 or FSDP leaves such states.
    """
    empty = [key for key, values in states.items() if any(prod(shape) == 0 for shape in per_element(values).values())]
    if len(empty) > sum(prod(shape) == 0 for shape in parameters.values()):
        what = "optimizer states have no elements"
        found = f"empty states for {pluralize(len(empty), 'parameter')}, the first is {empty[0]}"
        raise CorruptError(what, path=path, expected="the parameters' shapes", found=found)
