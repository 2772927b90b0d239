"""Optimizer states read so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from ckpt.base.errors import CkptError, CorruptError, LossError
from ckpt.containers.torchfile.scalars import number_state
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, Key, ParamGroup
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Shape, Tensor, Whole, whole
from ckpt.state.adam import missing_states
from ckpt.state.skipped_states import Unread
from converters.optimizers.shapes import PER_ELEMENT, check_shape, misshapen
from converters.optimizers.state_dicts import with_same_options
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
    "FSDP had not gathered this state before the save, so its values are undefined; a sharded state dict has it"
)
#: A value per element in every optimizer.
_OF_ITS_SHAPE = (MASTER, "exp_avg")
#: States independent of a parameter's dimensions.
_OF_EVERY = PER_ELEMENT | {"step"}
#: Options that change no state's presence.
_WITHOUT_EFFECT = frozenset({"lr", "initial_lr", "weight_decay", "name", "param_names"})
_Error = TypeVar("_Error", bound=CkptError)


def missing_state_error(
    groups: Sequence[ParamGroup],
    dtypes: Mapping[Key, Any],
    dimensions: Mapping[str, int],
    kind: type[_Error],
    path: str,
) -> _Error | None:
    """Return the error for a parameter that lacks a state of its group, or of a group with the same options.

    `dtypes` has one for each state, or None for a number. A parameter may have fewer dimensions and so fewer
    states: SM3 and Shampoo have a state for each dimension. Parameters with other state dtypes are not compared: 8-bit
    optimizers keep small parameters in 32 bits. A parameter without any state has never been updated.
    """
    states: dict[str, dict[str, Any]] = {}
    for (fqn, name), dtype in dtypes.items():
        states.setdefault(fqn, {})[name] = dtype
    for group in groups:
        for fqn in group.fqns:
            if states.get(fqn) and (missing := missing_states(group.options, states[fqn])):
                what, found = "a parameter lacks a state of torch's Adam", ", ".join(sorted(states[fqn]))
                return kind(what, path=path, fqn=fqn, expected=", ".join(missing), found=found)
    options = [{name: one for name, one in g.options.items() if name not in _WITHOUT_EFFECT} for g in groups]
    for alike in with_same_options(dict(enumerate(options))):
        kinds: dict[tuple[frozenset[str], int, int], str] = {}
        members = ((number, fqn) for number in map(int, alike.fqns) for fqn in groups[number].fqns)
        for group_number, fqn in members:
            if states.get(fqn):
                kinds.setdefault((frozenset(states[fqn]), dimensions.get(fqn, 0), group_number), fqn)
        for (few, own, group_number), fqn in kinds.items():
            for (more, others, other_number), other in kinds.items():
                may_lack = (own < others or group_number != other_number) and not (more - few) & _OF_EVERY
                if few < more and not may_lack and all(states[fqn][name] == states[other][name] for name in few):
                    return kind(
                        "a parameter lacks an optimizer state of its group",
                        path=path,
                        fqn=fqn,
                        expected=", ".join(sorted(more - few)) + f", as {other} has",
                        found=", ".join(sorted(few)),
                    )
    return None


def check_can_be_read(checkpoint: Checkpoint) -> None:
    """Raise LossError for unreadable states: the output would look damaged."""
    if not checkpoint.unread:
        return
    dimensions = {fqn: len(tensor.shape) for (fqn, role), tensor in checkpoint.tensors.items() if role == WEIGHT}
    own = checkpoint.optimizer_states
    states: dict[Key, Any] = {(fqn, name): None for name, of in checkpoint.state.scalars.items() for fqn in of}
    states |= {key: tensor.dtype for key, tensor in checkpoint.tensors.items() if key[1] in own}
    if error := missing_state_error(checkpoint.state.param_groups, states, dimensions, LossError, checkpoint.path):
        error.hint = "; ".join((*checkpoint.unread, "use the format `hf` for the weights only"))
        raise error


@dataclass
class OptimizerStates:
    """States, for the fields with these names in `Checkpoint` and `TrainingState`."""

    groups: tuple[ParamGroup, ...] = ()
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    computed: dict[str, Callable[[], memoryview]] = field(default_factory=dict)
    quantized: dict[Key, str] = field(default_factory=dict)
    blocks: dict[Key, Stored] = field(default_factory=dict)
    unread: Unread = field(default_factory=Unread)
    #: Parameters with an object or a dict among their states.
    objects: set[str] = field(default_factory=set)
    #: Unknown quantized states, by kind. One example: its parameter, name and file.
    odd: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    #: Quantized states with a known part, by kind. One example: its parameter and name.
    known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def recorded(self) -> dict[str, Any]:
        return {"param_groups": self.groups, "scalars": self.scalars}

    def add(self, fqn: str, shape: Shape, states: Mapping[str, Any], path: str) -> None:
        """Add all states. Call `check_shapes` at the end."""
        nested = states.get(NESTED)
        hidden = set(nested) if isinstance(nested, Mapping) else set()
        for name, value in understood(states).items():
            if isinstance(value, Quantized | StoredTensor) and name in hidden and value.shape[-len(shape) :] != shape:
                # FSDP can't gather these.
                why = f"it has the shape {list(value.shape)}, not the parameter's: it may be one rank's part"
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

    def check_shapes(self, parameters: Mapping[str, Shape], path: str) -> None:
        names: dict[str, set[str]] = {}
        numbers = ((fqn, name) for name, own in self.scalars.items() for fqn in own)
        for fqn, name in (*self.tensors, *numbers):
            names.setdefault(fqn, set()).add(name)
        plain = [
            tensor
            for key, tensor in self.tensors.items()
            if key not in self.quantized and tensor.dtype in CAST_SOURCES and tensor.fqn not in self.objects
        ]
        for tensor in misshapen(plain, parameters, names):
            check_shape(tensor.fqn, tensor.role, tensor.shape, parameters[tensor.fqn], path)

    def check_all_there(self, parameters: Mapping[str, Shape], path: str) -> None:
        """Raise CorruptError for one of `parameters` that lacks a state of its group."""
        without_dtype = [*self.scalars.items(), *((name, fqns) for (name, _), fqns in self.unread.fqns.items())]
        states: dict[Key, Any] = {(fqn, name): None for name, fqns in without_dtype for fqn in fqns}
        states |= {key: tensor.dtype for key, tensor in self.tensors.items()}
        states = {key: dtype for key, dtype in states.items() if key[0] in parameters}
        dimensions = {fqn: len(shape) for fqn, shape in parameters.items()}
        if error := missing_state_error(self.groups, states, dimensions, CorruptError, path):
            raise error

    def add_number(self, fqn: str, name: str, value: Any) -> None:
        self.scalars.setdefault(name, {})[fqn] = value

    def agree(self, fqns: Iterable[str], name: str, value: Any, who: str = "ranks", **where: Any) -> None:
        """Add a shared number. Raise CorruptError if another value is known.

        `who` names its holders in the error.
        """
        known = self.scalars.setdefault(name, {})
        for fqn in fqns:
            if known.setdefault(fqn, value) != value:
                raise CorruptError(
                    f"{who} disagree about a parameter's {name!r} in the optimizer",
                    fqn=fqn,
                    expected=known[fqn],
                    found=value,
                    **where,
                )

    def add_stored(self, fqn: str, name: str, shape: Shape, value: StoredTensor, path: str) -> None:
        """Add a tensor. A single element is a number, unless the parameter has only one."""
        extent = value.extent
        if extent.numel == 1 and prod(shape) > 1 and name in _OF_ITS_SHAPE:
            expected = f"a tensor with the shape {list(shape)}"
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
        """Add a tensor with quantized boxes. `plain` are its other boxes, in fp32."""
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
        """Add a tensor whose parts include tensor subclass objects.

        Each part has its box, stored value, rank and file path.
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
        self.known.setdefault(part.method, (fqn, name))

    def add_unknown(self, fqn: str, name: str, value: Any, path: str) -> None:
        kind = value.typename if isinstance(value, Record) else "a dict"
        self.objects.add(fqn)
        self.unread.add(name, f"it is {kind}, in an unknown form", [fqn])
        if known := kind_of(value):
            files = [part.extent.path for part in value.attributes.values() if isinstance(part, StoredTensor)]
            self.odd.setdefault(known, (fqn, name, files[0] if files else path))

    def left_out(self) -> tuple[str, ...]:
        """Describe the states left out, after all are read.

        Raise CorruptError if its kind was parsed elsewhere: then its parts are damaged.
        """
        for method, (fqn, name, path) in self.odd.items():
            if sibling := self.known.get(method):
                raise CorruptError(
                    f"the parts don't match in the quantized {name}",
                    path=path,
                    fqn=fqn,
                    expected=f"{method}, built like {sibling[1]} of {sibling[0]}",
                    found="codes or factors with another dtype, size or stride",
                )
        return self.unread.sentences

    def add_tensor(self, tensor: Tensor, path: str) -> None:
        if tensor.role == WEIGHT:
            raise CorruptError("an optimizer state uses a role's name", path=path, fqn=tensor.fqn, found=tensor.role)
        if tensor.key in self.tensors:
            raise CorruptError("one parameter has the same state twice", path=path, fqn=tensor.fqn, found=tensor.role)
        self.tensors[tensor.key] = tensor
