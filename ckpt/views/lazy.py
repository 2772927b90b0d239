"""Lazy reads of tensors and their parts, as torch tensors or numpy arrays."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from itertools import islice
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

from ckpt.base.errors import UsageError, printable, shown
from ckpt.base.text import aligned, did_you_mean, pluralize, preformatted
from ckpt.plan.checkpoint import BUFFER, Checkpoint, Key
from ckpt.plan.tensors import Box, Shape, Tensor

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

    from ckpt.move.files import OpenFiles
    from ckpt.move.reading import Computed

Index = int | slice | EllipsisType

#: Listed by `dir`. The others are for formats.
_PUBLIC = (
    *("config", "files", "format", "framework", "get", "is_adapter", "items", "keys", "notes", "optimizer_states"),
    *("parameters", "path", "shapes", "state", "step", "tag", "tensors", "ties", "values", "world_size"),
)
_ROWS = 20  # tensors shown in a notebook


class LazyTensor:
    """A tensor that is read on indexing: `tensor[0:8]` reads only the bytes in these rows."""

    def __init__(self, tensor: Tensor, computed: Computed, sources: OpenFiles | None = None) -> None:
        self._tensor = tensor
        self._computed = computed
        self._sources = sources  # keeps the files open between reads

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
        """Read the indexed part as a torch tensor. Integers, slices with step 1 and an ellipsis work as in torch.

        Raise UsageError for other indices or without torch, IndexError if an index is out of range, CorruptError or
        StorageError.
        """
        import numpy as np

        try:
            import torch
        except ImportError:
            raise UsageError(
                "indexing returns a torch tensor, and torch is not installed",
                fqn=self._tensor.fqn,
                hint="pip install torch; or use `.numpy(index)` without torch",
            ) from None
        bits = self._read(index)
        return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(getattr(torch, self.dtype)).reshape(bits.shape)

    def numpy(self, index: Index | tuple[Index, ...] = ...) -> NDArray[Any]:
        """Read the indexed part as a numpy array, by default the whole tensor. torch is not needed.

        bfloat16 and the 8-bit floats need `ml_dtypes`. Raise the same errors as indexing, and UsageError without that
        package.
        """
        import numpy as np

        if not hasattr(np, name := self.dtype):
            try:
                import ml_dtypes
            except ImportError:
                raise UsageError(
                    f"numpy itself has no {name}", fqn=self._tensor.fqn, hint="pip install ml_dtypes"
                ) from None
            return self._read(index).view(getattr(ml_dtypes, name))
        return self._read(index).view(name)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the result is always in CPU memory

    def _read(self, index: Index | tuple[Index, ...]) -> NDArray:
        from ckpt.move.reading import read_box

        box, dropped = _box(index if isinstance(index, tuple) else (index,), self.shape)
        bits = read_box(self._tensor, box, self._computed, self._sources)
        return bits.squeeze(dropped) if dropped else bits


class OpenCheckpoint(Checkpoint):
    """A checkpoint with readable tensors. It works like a dict.

    Its keys are the names of parameters and buffers. Lookup also accepts tied names, and `(fqn, role)` pairs for
    optimizer states, but iteration and `len` skip them.

    Example:
        checkpoint = ckpt.open("outputs")
        rows = checkpoint["model.embed_tokens.weight"][0:8]
        momentum = checkpoint["model.embed_tokens.weight", "exp_avg"][...]
    """

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> OpenCheckpoint:
        return cls(**{field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)})

    def __dir__(self) -> list[str]:
        return list(_PUBLIC)

    @cached_property
    def _named(self) -> Mapping[str, Tensor]:
        return {tensor.fqn: tensor for tensor in self.with_role(BUFFER)} | self.parameters

    def __getitem__(self, key: str | Key) -> LazyTensor:
        """Return the tensor `fqn` (the model's weight, or its master if there is no other), or `(fqn, role)`."""
        tensor = self.tensors.get(key) if isinstance(key, tuple) else self._named.get(self.ties.get(key, key))
        if tensor is None:
            raise KeyError(self._missing(key))
        return LazyTensor(tensor, self.computed)

    def get(self, fqn: str, role: str | None = None) -> Any:
        """Return the tensor, or its description in `role`. None if it is missing."""
        if role is not None:
            return super().get(fqn, role)
        with suppress(KeyError):
            return self[fqn]
        return None

    @property
    def step(self) -> int | None:
        """Training step, or None if it is not recorded."""
        return self.state.step

    def __contains__(self, key: object) -> bool:
        return key in self.tensors if isinstance(key, tuple) else self.ties.get(str(key), key) in self._named

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __bool__(self) -> bool:
        return True

    def _missing(self, key: str | Key) -> str:
        fqn, role = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        roles = [role for name, role in self.tensors if name == fqn]
        if role is not None and roles:
            return f"{fqn!r} has no {role!r}: {did_you_mean(role, roles) or 'it has ' + ', '.join(roles)}"
        hint = did_you_mean(str(fqn), [*self._named, *self.ties])
        return f"there is no tensor {fqn!r}" + (f": {hint}" if hint else "")

    def keys(self) -> KeysView[str]:
        return self._named.keys()

    def values(self) -> ValuesView[LazyTensor]:
        return ValuesView(cast(Mapping[str, LazyTensor], self))

    def items(self) -> ItemsView[str, LazyTensor]:
        return ItemsView(cast(Mapping[str, LazyTensor], self))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._named)

    def _repr_html_(self) -> str:
        rows = [
            (printable(fqn), one.dtype.name, str(list(one.shape))) for fqn, one in islice(self._named.items(), _ROWS)
        ]
        more = [f"... and {len(self) - _ROWS} more"] if len(self) > _ROWS else []
        return preformatted("\n".join([repr(self), *aligned(("name", "dtype", "shape"), rows), *more]))

    def __repr__(self) -> str:
        facts: list[Any] = [self.format]
        facts += [pluralize(self.world_size, "rank")] if self.world_size else []
        facts += [f"step {self.state.step}"] if self.state.step is not None else []
        states = f", with {', '.join(self.optimizer_states)}" if self.optimizer_states else ""
        return f"<{shown(self.path)}: {', '.join(facts)}; {pluralize(len(self), 'tensor')}{states}>"


def becomes_infinite(tensor: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Return True if a finite number of `tensor` is infinite in `rounded`."""
    infinite = rounded.isinf()
    return bool(infinite.any() and (infinite & tensor.isfinite()).any())


def _box(index: tuple[Index, ...], shape: Shape) -> tuple[Box, tuple[int, ...]]:
    """Return the box, and the dims removed by integers."""
    if index.count(...) > 1 or len([i for i in index if i is not ...]) > len(shape):
        raise UsageError("too many indices", expected=f"at most {len(shape)}", found=str(index))
    split = index.index(...) if ... in index else len(index)
    head, tail = index[:split], index[split + 1 :]
    full = (*head, *(slice(None),) * (len(shape) - len(head) - len(tail)), *tail)
    offsets, sizes, dropped = [], [], []
    for dim, (one, size) in enumerate(zip(full, shape, strict=True)):
        if isinstance(one, slice):
            try:
                start, stop, step = one.indices(size)
            except TypeError:
                raise UsageError("a tensor is sliced by ints", found=repr(one)) from None
            if step != 1:
                raise UsageError("only slices with step 1 are read", found=str(one))
            offsets.append(start)
            sizes.append(max(0, stop - start))
        else:
            if not isinstance(one, int):
                raise UsageError("a tensor is indexed by ints, slices and an ellipsis", found=repr(one))
            if not -size <= one < size:
                raise IndexError(f"index {one} is out of range for dim {dim} of size {size}")
            offsets.append(one % size)
            sizes.append(1)
            dropped.append(dim)
    return Box(tuple(offsets), tuple(sizes)), tuple(dropped)
