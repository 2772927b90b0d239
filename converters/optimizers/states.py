"""What has been read of an optimizer, by parameter: tensors of any shape, numbers, quantized ones, and param groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.torchfile.scalars import number_state
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import MASTER, WEIGHT, Key, ParamGroup
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Shape, Tensor, Whole, whole
from ckpt.state.unread import Unread
from converters.optimizers.shapes import check_shape, per_element
from converters.quantized.states import (
    NESTED,
    Quantized,
    Stored,
    check_place,
    is_unfinished,
    kind_of,
    pieces,
    torchao,
    understood,
)

_UNFINISHED = (
    "the file was written before FSDP had gathered it, and may hold anything there (torch waits for plain tensors "
    "only); a sharded state dict has it"
)
#: What every optimizer has for each element of a parameter; of other names some have a number for the whole of it.
_OF_ITS_SHAPE = (MASTER, "exp_avg")


@dataclass
class OptimizerStates:
    """The states that have been read: for the fields of `Checkpoint` and of `TrainingState` with these names."""

    groups: tuple[ParamGroup, ...] = ()
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    computed: dict[str, Callable[[], memoryview]] = field(default_factory=dict)
    quantized: dict[Key, str] = field(default_factory=dict)
    blocks: dict[Key, Stored] = field(default_factory=dict)
    unread: Unread = field(default_factory=Unread)
    #: Quantized states that were not understood, by kind: the parameter, the name and the file of one of each.
    odd: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    #: Quantized states with at least one part that was understood, by kind: the parameter and the name of one of each.
    known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def recorded(self) -> dict[str, Any]:
        """The training state among it, by the fields of `TrainingState`."""
        return {"param_groups": self.groups, "scalars": self.scalars}

    def add(self, fqn: str, shape: Shape, states: Mapping[str, Any], path: str) -> None:
        """Add all states of a parameter of `shape`; `path` is their file, for messages."""
        nested = states.get(NESTED)
        hidden = set(nested) if isinstance(nested, Mapping) else set()
        for name, found in per_element(states).items():
            if name not in hidden:
                check_shape(fqn, name, found, shape, path)
        for name, value in understood(states).items():
            if isinstance(value, Quantized | StoredTensor) and name in hidden and value.shape[-len(shape) :] != shape:
                # What FSDP cannot gather is that of the rank which wrote the file.
                why = f"it has the shape {list(value.shape)}, not the parameter's: it may be the part of one rank"
                self.unread.add(name, why, [fqn])
            elif isinstance(value, Quantized):
                self.add_quantized(fqn, name, value.shape, {whole(value.shape): value})
            elif isinstance(value, StoredTensor):
                self.add_stored(fqn, name, shape, value, path)
            elif is_unfinished(value):
                self.unread.add(name, _UNFINISHED, [fqn])
            elif isinstance(value, Mapping | Record):
                self.add_unknown(fqn, name, value, path)
            else:
                self.add_number(fqn, name, value)

    def add_number(self, fqn: str, name: str, value: Any) -> None:
        self.scalars.setdefault(name, {})[fqn] = value

    def agree(self, fqns: Iterable[str], name: str, value: Any, who: str = "ranks", **where: Any) -> None:
        """Add a number of these parameters, which others may have, too: CorruptError where it was another one there.

        `who` have it; `where` is what an error says of the file.
        """
        known = self.scalars.setdefault(name, {})
        for fqn in fqns:
            if known.setdefault(fqn, value) != value:
                raise CorruptError(
                    f"{who} disagree in the optimizer's {name!r} of a parameter",
                    fqn=fqn,
                    expected=known[fqn],
                    found=value,
                    **where,
                )

    def add_stored(self, fqn: str, name: str, shape: Shape, value: StoredTensor, path: str) -> None:
        """Add a tensor; one of a single element is a number, but where the parameter itself has no more."""
        extent = value.extent
        if extent.numel == 1 and prod(shape) > 1 and name in _OF_ITS_SHAPE:
            expected = f"a tensor of the shape {list(shape)}"
            raise CorruptError(f"{name} is a single number", path=path, fqn=fqn, expected=expected)
        if extent.numel == 1 and len(extent.shape) <= 1 and (name == "step" or extent.shape != shape):
            self.add_number(fqn, name, number_state(name, extent))
        else:
            self.add_tensor(Tensor(fqn, name, extent.dtype, extent.shape, Whole(extent)), path)

    def add_quantized(
        self,
        fqn: str,
        name: str,
        shape: Shape,
        parts: Mapping[Box, Quantized],
        plain: tuple[Fragment, ...] = (),
    ) -> None:
        """Add a tensor of which these boxes are quantized; `plain` are the others, in fp32."""
        source = pieces(parts, shape)
        for one in parts.values():
            self.computed |= one.blocks()
            self.know(fqn, name, one)
        self.add_tensor(Tensor(fqn, name, FLOAT32, shape, Pieces((*source.pieces, *plain))), "")
        self.quantized[fqn, name] = next(iter(parts.values())).method
        self.blocks[fqn, name] = Stored(shape, parts, plain)

    def add_parts(
        self, fqn: str, name: str, shape: Shape, parts: Iterable[tuple[Box, Record | Extent, int | None, str]]
    ) -> None:
        """Add a tensor whose parts are, at least in part, objects of a tensor subclass.

        Each part has its box, what is stored, the rank that has it and the path of its file.
        """
        quantized: dict[Box, Quantized] = {}
        plain: list[Fragment] = []
        odd: list[tuple[Record, str]] = []
        for box, value, rank, path in parts:
            if isinstance(value, Extent):
                plain.append(Fragment(box, value, rank))
            elif (one := torchao(value)) is None:
                odd.append((value, path))
            else:
                check_place(one, box, path, fqn, name)
                self.know(fqn, name, one)
                quantized[box] = one
        if odd:
            self.add_unknown(fqn, name, *odd[0])
        elif dtypes := {str(part.extent.dtype) for part in plain} - {str(FLOAT32)}:
            self.unread.add(name, f"parts of it are {', '.join(sorted(dtypes))}, others quantized", [fqn])
        else:
            held = {part.region: part for part in plain if part.extent.numel}
            self.add_quantized(fqn, name, shape, quantized, tuple(held.values()))

    def know(self, fqn: str, name: str, part: Quantized) -> None:
        """Remember that this part of a state is understood, even if another is not."""
        self.known.setdefault(part.method, (fqn, name))

    def add_unknown(self, fqn: str, name: str, value: Any, path: str) -> None:
        """Leave out a state that is, or contains, an object of an unknown class.

        `path`, for messages, is that of its file or of what names it.
        """
        kind = value.typename if isinstance(value, Record) else "a dict"
        self.unread.add(name, f"it is {kind}, in an unknown form", [fqn])
        if known := kind_of(value):
            files = [part.extent.path for part in value.attributes.values() if isinstance(part, StoredTensor)]
            self.odd.setdefault(known, (fqn, name, files[0] if files else path))

    def left_out(self) -> tuple[str, ...]:
        """The states that are left out, a sentence each, once all are read.

        CorruptError where one is of a kind that was understood elsewhere: its parts are damaged.
        """
        for method, (fqn, name, path) in self.odd.items():
            if sibling := self.known.get(method):
                raise CorruptError(
                    f"the parts of the quantized {name} do not fit each other",
                    path=path,
                    fqn=fqn,
                    expected=f"{method}, built as {sibling[1]} of {sibling[0]}",
                    found="codes or factors of another dtype, size or stride",
                )
        return self.unread.sentences

    def add_tensor(self, tensor: Tensor, path: str) -> None:
        if tensor.role == WEIGHT:
            raise CorruptError(
                "an optimizer state has the name of a role", path=path, fqn=tensor.fqn, found=tensor.role
            )
        if tensor.key in self.tensors:
            raise CorruptError("a parameter has the same state twice", path=path, fqn=tensor.fqn, found=tensor.role)
        self.tensors[tensor.key] = tensor
