"""Protocols for the modules in `ckpt.plan.services`, only for mypy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Region, Shape, Tensor

Config = Mapping[str, Any]


class TiesProtocol(Protocol):
    """Tied tensors: names in Hub files and in memory, and configs with ties removed."""

    def kept_names(self, checkpoint: Checkpoint) -> dict[str, str]: ...
    def tied_names(self, config: Config, stored: Collection[str]) -> dict[str, str]: ...
    def declared_ties(self, config: Config) -> dict[str, str | None]: ...
    def untied_config(self, config: Config, aliases: Collection[str]) -> dict[str, Any] | None: ...


class TorchtitanProtocol(Protocol):
    """Namespace of a run with torchtitan's own names, None for other runs."""

    def namespace_of(self, checkpoint: Checkpoint) -> str | None: ...


class LayerNamesProtocol(Protocol):
    """Layer names, where an engine has replaced the model's own."""

    def with_known_names(self, checkpoint: Checkpoint) -> Checkpoint: ...


class ProofProtocol(Protocol):
    """Comparison of a model's files with the files its architecture saves."""

    def differences(self, config: Config, shapes: Mapping[str, Shape]) -> str | None: ...
    def prove(self, config: Config, shapes: Mapping[str, Shape], path: str) -> object: ...


class ExpectedProtocol(Protocol):
    """Parts and tensors described by the config but missing in a checkpoint."""

    def missing_content(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]: ...
    def table_shapes(self, config: Config | None) -> Mapping[str, Shape]: ...


class ModuleProtocol(Protocol):
    """A module's class, and facts that shapes do not show.

    `layer` is the nearest known base class. `is_transposed`: its stacked experts are [experts, in, out]. `parameters`
    are its own, in registration order.
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
    """A transformers class: saved tensors, tied tensors, and the path of its inner model."""

    @property
    def name(self) -> str: ...
    @property
    def optional(self) -> Mapping[str, Shape]: ...
    @property
    def prefix(self) -> str: ...
    def num_labels(self, head: Mapping[str, Shape]) -> int | None: ...
    def shapes(self, num_labels: int | None) -> dict[str, Shape]: ...


class ClassesProtocol(Protocol):
    """Transformers class that an adapter was trained on, by task or class name."""

    def trained_class(self, config: Config | None, task: object, name: object) -> ModelClassProtocol | None: ...


Leaves = Sequence[tuple[tuple[Any, ...], Any]]


class StateDictProtocol(Protocol):
    """Leaves of a nested state dict, by path."""

    @property
    def model(self) -> Leaves: ...
    @property
    def optimizer(self) -> Leaves: ...
    @property
    def rest(self) -> Leaves: ...


class StateDictsProtocol(Protocol):
    """Nested state dict for torch's save and load functions."""

    def state_dict(self, checkpoint: Checkpoint, dtype: DType | None) -> StateDictProtocol: ...


class FaultProtocol(Protocol):
    """A missing, unexpected or mismatched part of a quantized weight. A mismatch is in shape or dtype."""

    @property
    def fqn(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def is_missing(self) -> bool: ...


class QuantizedWeightsProtocol(Protocol):
    """A checkpoint's quantized weights, with their parts' names and faults."""

    @property
    def title(self) -> str: ...
    @property
    def owners(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def parts(self) -> frozenset[str]: ...
    @property
    def num_parameters(self) -> Mapping[str, int | None]: ...
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
    """Lookup of a checkpoint's quantized weights."""

    def quantized_weights(self, checkpoint: Checkpoint, *, reads: bool = True) -> QuantizedWeightsProtocol: ...


class RoundedWeightProtocol(Protocol):
    """Quantized weight to compare with the numbers before rounding."""

    @property
    def method(self) -> str: ...
    @property
    def unbounded(self) -> str: ...
    @property
    def parts(self) -> Collection[str]: ...
    def errors(
        self, plain: Tensor, computed: Mapping[str, Callable[[], memoryview]]
    ) -> Iterator[tuple[Region, int, Any, Any]]: ...


class RoundingProtocol(Protocol):
    """Rounding errors of quantized weights."""

    def rounded_weights(self, checkpoint: Checkpoint) -> Mapping[str, RoundedWeightProtocol]: ...


class DequantizingProtocol(Protocol):
    """Replacement of quantized weights by plain ones."""

    def dequantized(self, checkpoint: Checkpoint, dtype: DType | None) -> Checkpoint: ...
    def can_dequantize(self, checkpoint: Checkpoint) -> bool: ...


class QuantizingProtocol(Protocol):
    """Replacement of plain weights by quantized ones."""

    def quantized(
        self, checkpoint: Checkpoint, method: str, dtype: DType | None, like: Checkpoint | None = None
    ) -> Checkpoint: ...
    def rule(self, checkpoint: Checkpoint, method: str) -> str: ...


class StoredStatesProtocol(Protocol):
    """Replacement of optimizer states by the tensors that store them quantized."""

    def as_stored(self, checkpoint: Checkpoint) -> Checkpoint: ...
