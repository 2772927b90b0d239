"""Assembly of a tensor from several ranks' parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from ckpt.base.errors import CorruptError
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Fragment, Pieces, Shape, Tensor

_Region = TypeVar("_Region", bound=Hashable)
_Held = TypeVar("_Held")


def assemble(fqn: str, role: str, parts: Sequence[tuple[Shape, Fragment]], native: DType | None = None) -> Tensor:
    """Return the tensor made from `parts`, each with the whole tensor's shape.

    Raise CorruptError for different tensors.
    """
    shape, first = parts[0]
    for other, part in parts:
        if (other, part.extent.dtype) != (shape, first.extent.dtype):
            raise CorruptError(
                f"ranks store different tensors under one name ({role})",
                path=part.extent.path,
                rank=part.rank,
                fqn=fqn,
                expected=f"{first.extent.dtype} {list(shape)}, like on rank {first.rank}",
                found=f"{part.extent.dtype} {list(other)}",
            )
    copies = whole_copies((part.region, part) for _, part in parts if part.region.numel)
    sources = [Pieces(tuple(copy)) for copy in copies] or [Pieces(())]
    dtype = first.extent.dtype
    return Tensor(fqn, role, dtype, shape, sources[0], native if native != dtype else None, tuple(sources[1:]))


def whole_copies(held: Iterable[tuple[_Region, _Held]]) -> list[list[_Held]]:
    """Group each region's holders into complete copies. A region with fewer holders reuses its last one."""
    holders: dict[_Region, list[_Held]] = {}
    for region, one in held:
        holders.setdefault(region, []).append(one)
    count = max(map(len, holders.values()), default=0)
    return [[found[min(copy, len(found) - 1)] for found in holders.values()] for copy in range(count)]
