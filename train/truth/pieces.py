"""Whole tensors assembled from the ranks' pieces."""

from dataclasses import dataclass
from typing import Any

import torch

from train import launch


@dataclass(frozen=True)
class Place:
    """Position in a tensor for one rank's part."""

    name: str
    shape: tuple[int, ...]
    """Part's shape."""
    dim: int | None = None
    """Dimension sharded over tensor-parallel ranks, or None if all ranks hold the whole tensor."""
    stride: int = 1
    """Number of blocks sharded separately, for example 2 for the gate and up rows of one matrix."""
    index: int = 0
    count: int = 1
    """This part's index, and the number of parts."""
    sections: tuple[int, ...] = ()
    """Block sizes in the part if they differ."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Whole tensor's shape."""
        return tuple(size * self.count if dim == self.dim else size for dim, size in enumerate(self.shape))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return whole
        blocks = [block.chunk(self.count, self.dim)[self.index] for block in self._blocks(whole, self.count)]
        return torch.cat(blocks, self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.dim is None:
            return parts[0]
        blocks = [self._blocks(part, 1) for part in parts]
        return torch.cat([block for column in zip(*blocks, strict=True) for block in column], self.dim)

    def _blocks(self, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        assert self.dim is not None
        if self.sections:
            return tensor.split([size * count for size in self.sections], self.dim)
        return tensor.chunk(self.stride, self.dim)


@dataclass(frozen=True)
class Piece:
    """Flattened range in a part: the whole part, or one data-parallel rank's share."""

    role: str
    place: Place
    start: int
    elements: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plain bytes; torch would write a file per tensor, which is far slower."""
        data = bits(self.elements).cpu().numpy()
        return _unpickled, (self.role, self.place, self.start, self.elements.dtype, data)


def _unpickled(role: str, place: Place, start: int, dtype: torch.dtype, data: Any) -> Piece:
    return Piece(role, place, start, torch.from_numpy(data).view(dtype))


def collect(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    return assemble([piece for of_rank in launch.gather_objects(pieces) for piece in of_rank])


def assemble(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """Assemble pieces into whole tensors named `<role>/<name>`.

    Raise RuntimeError if pieces disagree on an element, or an element is missing.
    """
    parts: dict[tuple[str, str], dict[int, tuple[Place, torch.Tensor, torch.Tensor]]] = {}
    for piece in pieces:
        place, key = piece.place, (piece.role, piece.place.name)
        held = parts.setdefault(key, {})
        if place.index not in held:
            size = torch.Size(place.shape).numel()
            elements = torch.empty(size, dtype=piece.elements.dtype)
            held[place.index] = (place, elements, torch.zeros(size, dtype=torch.bool))
        known, elements, seen = held[place.index]
        if known != place or elements.dtype != piece.elements.dtype:
            raise RuntimeError(f"{key}: ranks disagree on shape, dtype or split: {known} and {place}")
        span = slice(piece.start, piece.start + len(piece.elements))
        both = seen[span]
        if not torch.equal(bits(elements[span][both]), bits(piece.elements[both])):
            raise RuntimeError(f"{key}: ranks disagree on shared elements")
        elements[span] = piece.elements
        seen[span] = True
    whole = {}
    for (role, name), held in parts.items():
        place = held[min(held)][0]
        if set(held) != set(range(place.count)) or not all(seen.all() for _, _, seen in held.values()):
            raise RuntimeError(f"{role} of {name}: some elements are on no rank")
        whole[f"{role}/{name}"] = place.join([held[index][1].view(place.shape) for index in sorted(held)])
    return whole


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes, to distinguish -0.0 from 0.0 and one NaN from another."""
    return tensor.contiguous().view(torch.uint8)
