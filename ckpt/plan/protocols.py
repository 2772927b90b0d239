"""Protocols of the modules in `ckpt.plan.services`, for mypy alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Shape

Config = Mapping[str, Any]


class TiesProtocol(Protocol):
    """Tied tensors: their names in the Hub's files and in memory, and a config without given ties."""

    def kept_names(self, checkpoint: Checkpoint) -> dict[str, str]: ...
    def tied_names(self, config: Config, stored: Collection[str]) -> dict[str, str]: ...
    def declared_ties(self, config: Config) -> dict[str, str | None]: ...
    def untied_config(self, config: Config, aliases: Collection[str]) -> dict[str, Any] | None: ...


class TorchtitanProtocol(Protocol):
    """The namespace of a run whose own names are torchtitan's; None for others."""

    def namespace_of(self, checkpoint: Checkpoint) -> str | None: ...


class LayerNamesProtocol(Protocol):
    """Names of layers that an engine puts in the place of the model's own."""

    def with_known_names(self, checkpoint: Checkpoint) -> Checkpoint: ...


class ProofProtocol(Protocol):
    """Comparison of a model's files with those that its architecture saves."""

    def differences(self, config: Config, shapes: Mapping[str, Shape]) -> str | None: ...
    def prove(self, config: Config, shapes: Mapping[str, Shape], path: str) -> object: ...


class ExpectedProtocol(Protocol):
    """Parts and tensors that the config describes and a checkpoint lacks."""

    def lacking_of(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]: ...


class ModuleProtocol(Protocol):
    """A module's class, and what else shapes do not tell.

    `layer` is the nearest known layer that it derives from.  `is_transposed`: its stacked experts are [experts, in,
    out].  `parameters` are its own, in the order in which it registers them.
    """

    @property
    def layer(self) -> str | None: ...
    @property
    def is_conv1d(self) -> bool: ...
    @property
    def is_transposed(self) -> bool: ...
    @property
    def is_interleaved(self) -> bool: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...


class ModulesProtocol(Protocol):
    """The modules of a model."""

    def describe(
        self, config: Config | None, shapes: Mapping[str, Shape], names: Iterable[str] | None
    ) -> Mapping[str, ModuleProtocol] | None: ...
    def has_conv1d(self, config: Config | None) -> bool | None: ...


class ModelClassProtocol(Protocol):
    """A class of transformers: tensors that it saves, tensors that it ties, and the path of its inner model."""

    @property
    def name(self) -> str: ...
    @property
    def optional(self) -> Mapping[str, Shape]: ...
    @property
    def prefix(self) -> str: ...
    def num_labels(self, head: Mapping[str, Shape]) -> int | None: ...
    def shapes(self, num_labels: int | None) -> dict[str, Shape]: ...


class ClassesProtocol(Protocol):
    """The class of transformers that an adapter was trained on, by its task or the class's name."""

    def trained_class(self, config: Config | None, task: object, name: object) -> ModelClassProtocol | None: ...


Leaves = Sequence[tuple[tuple[Any, ...], Any]]


class StateDictProtocol(Protocol):
    """The leaves of a nested state dict by path."""

    @property
    def model(self) -> Leaves: ...
    @property
    def optimizer(self) -> Leaves: ...
    @property
    def rest(self) -> Leaves: ...


class StateDictsProtocol(Protocol):
    """The nested state dict that torch's functions save and load."""

    def state_dict(self, checkpoint: Checkpoint, dtype: DType | None) -> StateDictProtocol: ...


class FaultProtocol(Protocol):
    """A part of a quantized weight that is missing, unexpected, or has another shape or dtype."""

    @property
    def fqn(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def is_missing(self) -> bool: ...


class QuantizedWeightsProtocol(Protocol):
    """The quantized weights of a checkpoint, with the names and faults of their parts."""

    @property
    def title(self) -> str: ...
    @property
    def owners(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def parts(self) -> frozenset[str]: ...
    @property
    def packed(self) -> frozenset[str]: ...
    @property
    def exponents(self) -> frozenset[str]: ...
    @property
    def scales(self) -> frozenset[str]: ...
    @property
    def indices(self) -> Mapping[str, int]: ...
    @property
    def recorded_shapes(self) -> Mapping[str, Shape]: ...
    @property
    def faults(self) -> Sequence[FaultProtocol]: ...
    @property
    def unproved(self) -> str | None: ...
    @property
    def unwritable(self) -> str | None: ...
    def in_place(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]: ...
    def is_packed_shape(self, packed: Shape, recorded: Shape) -> bool: ...


class QuantizationProtocol(Protocol):
    """The quantized weights of a checkpoint."""

    def quantized_weights(self, checkpoint: Checkpoint) -> QuantizedWeightsProtocol: ...


class DequantizingProtocol(Protocol):
    """Plain weights in the place of quantized ones."""

    def dequantized(self, checkpoint: Checkpoint, dtype: DType | None) -> Checkpoint: ...
    def can_dequantize(self, checkpoint: Checkpoint) -> bool: ...


class StoredStatesProtocol(Protocol):
    """Tensors that store quantized optimizer states, in the place of their values."""

    def as_stored(self, checkpoint: Checkpoint) -> Checkpoint: ...
