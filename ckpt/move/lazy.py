"""Reading a part of one tensor of a checkpoint, as a torch tensor."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING

from ckpt.errors import UsageError
from ckpt.plan.checkpoint import BUFFER, Checkpoint, Key
from ckpt.plan.tensors import Box, Shape, Tensor

if TYPE_CHECKING:
    import torch

    from ckpt.move.reading import Computed

Index = int | slice | EllipsisType


class LazyTensor:
    """A tensor that is read where it is indexed: `tensor[0:8]` reads the bytes of these rows and no others."""

    def __init__(self, tensor: Tensor, computed: Computed) -> None:
        self._tensor = tensor
        self._computed = computed

    @property
    def shape(self) -> Shape:
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        return self._tensor.dtype.name

    def __repr__(self) -> str:
        tensor = self._tensor
        return f"LazyTensor({tensor.fqn!r}, {tensor.role!r}, {tensor.dtype}, {list(tensor.shape)})"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Integers, slices with step 1 and an ellipsis, as torch takes them."""
        import numpy as np
        import torch

        from ckpt.move.reading import read_box

        box, dropped = _box(index if isinstance(index, tuple) else (index,), self.shape)
        flat = read_box(self._tensor, box, self._computed).reshape(-1)
        result = torch.from_numpy(flat.view(np.uint8)).view(getattr(torch, self.dtype)).reshape(box.sizes)
        return result.squeeze(dropped) if dropped else result


class OpenCheckpoint(Checkpoint):
    """A description whose tensors can be read: what `ckpt.open` returns."""

    def __getitem__(self, key: str | Key) -> LazyTensor:
        """The tensor `fqn` (the model's weight, or its master where only that is stored), or `(fqn, role)`.

        It is read where it is indexed: `checkpoint["fqn"][0:8]`.  Raises KeyError where there is none.
        """
        if isinstance(key, tuple):
            tensor = self.tensors.get(key)
        else:
            fqn = self.ties.get(key, key)
            tensor = self.parameters.get(fqn) or self.get(fqn, BUFFER)
        if tensor is None:
            raise KeyError(key)
        return LazyTensor(tensor, self.computed)


def _box(index: tuple[Index, ...], shape: Shape) -> tuple[Box, tuple[int, ...]]:
    """The box that an index names, and the dims that an integer took away."""
    if index.count(...) > 1 or len([i for i in index if i is not ...]) > len(shape):
        raise UsageError("too many indices", expected=f"at most {len(shape)}", found=str(index))
    split = index.index(...) if ... in index else len(index)
    head, tail = index[:split], index[split + 1 :]
    full = (*head, *(slice(None),) * (len(shape) - len(head) - len(tail)), *tail)
    offsets, sizes, dropped = [], [], []
    for dim, (one, size) in enumerate(zip(full, shape, strict=True)):
        if isinstance(one, slice):
            start, stop, step = one.indices(size)
            if step != 1:
                raise UsageError("only slices with step 1 are read", found=str(one))
            offsets.append(start)
            sizes.append(max(0, stop - start))
        else:
            assert isinstance(one, int)
            if not -size <= one < size:
                raise IndexError(f"index {one} is out of range for dim {dim} of size {size}")
            offsets.append(one % size)
            sizes.append(1)
            dropped.append(dim)
    return Box(tuple(offsets), tuple(sizes)), tuple(dropped)
