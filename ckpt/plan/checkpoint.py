"""The description of a whole checkpoint, the layout of a target, and the protocol that a format implements.

A reader turns files into a `Checkpoint`; a writer turns a `Checkpoint` into a `Target`.  Neither moves tensor
data, and neither knows which other formats exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from ckpt.errors import CorruptError
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent, Region, Tensor

#: Roles with a meaning of their own; every other role is the name of an optimizer state.
WEIGHT, MASTER, BUFFER = "weight", "master", "buffer"

#: Names of parameters: as the Hub's files spell them, as transformers' modules spell them in memory, as
#: megatron-core's GPTModel does with its layers and experts numbered over the whole model, or as the model at hand
#: does, when nothing more is known of it.
HUB, TRANSFORMERS, MEGATRON, OWN = "hub", "transformers", "megatron", "own"

Key = tuple[str, str]  # (fqn, role)
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Hyperparameters (`lr`, `betas`, ...) and the parameters that they apply to, by fqn."""

    fqns: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything of a run that is not a tensor of a parameter.

    `scalars` holds optimizer states that are one number per parameter, by state name and fqn (Adam's `step`);
    `items` everything else by its name in the format: LR scheduler, loss scaler, RNG, the user's own entries.
    """

    step: int | None = None
    param_groups: tuple[ParamGroup, ...] = ()
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    items: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when its metadata was read; a change of any field means that it has been replaced."""

    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def stat(cls, path: str) -> SourceFile:
        info = os.stat(path)
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ino)

    def check_unchanged(self) -> None:
        try:
            now = SourceFile.stat(self.path)
        except FileNotFoundError:
            now = None
        if now != self:
            raise CorruptError(
                "the file was replaced while it was being read",
                path=self.path,
                expected=f"{self.size} bytes, mtime {self.mtime_ns} ns, inode {self.inode}",
                found="no file" if now is None else f"{now.size} bytes, mtime {now.mtime_ns} ns, inode {now.inode}",
                hint="is a run still writing into this folder? wait for it, then convert again",
            )


@dataclass(frozen=True)
class Checkpoint:
    """A lazy description of a checkpoint: which bytes of which files hold which part of which tensor.

    `format` is the name of the format that read it, `framework` who wrote it, as far as it says so.
    `ties` maps an alias to the fqn that owns the tensor, as the checkpoint records it.
    `folders` are the places in which the run's other files (config, tokenizer) may stand, nearest first.
    `computed` gives the content of files that do not exist: extents with such a path are of what is computed when it is
    written, a merged LoRA adapter for one.
    """

    path: str
    format: str
    tensors: Mapping[Key, Tensor]
    files: tuple[SourceFile, ...]
    framework: str | None = None
    world_size: int | None = None
    namespace: str = OWN
    ties: Mapping[str, str] = field(default_factory=dict)
    state: TrainingState = field(default_factory=TrainingState)
    config: Mapping[str, Any] | None = None
    folders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    computed: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)

    def get(self, fqn: str, role: str) -> Tensor | None:
        return self.tensors.get((fqn, role))

    def with_role(self, *roles: str) -> Iterator[Tensor]:
        return (tensor for (_, role), tensor in self.tensors.items() if role in roles)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """One tensor per parameter: the model's own weight, or the fp32 master where only that is stored."""
        found: dict[str, Tensor] = {}
        for (fqn, role), tensor in self.tensors.items():
            if role == WEIGHT or (role == MASTER and fqn not in found):
                found[fqn] = tensor
        return found

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        """Names of the optimizer's states, sorted: `exp_avg`, `momentum_buffer`, ..."""
        roles = {role for _, role in self.tensors} - {WEIGHT, MASTER, BUFFER}
        return tuple(sorted(roles | set(self.state.scalars)))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What the user said about the source: `tag` of the step folder, and the folder or file of the model's config."""

    tag: str | None = None
    config: Path | None = None


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """What a writer has to know: `Layout(dtype=FLOAT32)`, and with options of its format `Layout(tp=2, pp=4)`.

    `dtype` None keeps the model's own; `max_shard_size` is in bytes; `world_size` None keeps the source's number
    of ranks.  `options` are those that the format declares, by name (see `ckpt.plan.options`); None asks for nothing.
    """

    dtype: DType | None
    max_shard_size: int
    world_size: int | None
    options: Mapping[str, Any]

    def __init__(
        self,
        dtype: DType | None = None,
        max_shard_size: int = 5_000_000_000,
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        asked = {name: value for name, value in {**(options or {}), **named}.items() if value is not None}
        for name, value in zip(self.__slots__, (dtype, max_shard_size, world_size, asked), strict=True):
            object.__setattr__(self, name, value)

    def read(self, declaration: type[Options]) -> Options:
        """What was asked for of the options that a format declares, as that dataclass.  Other options are ignored."""
        names = {one.name for one in fields(cast(Any, declaration))}
        return declaration(**{name: value for name, value in self.options.items() if name in names})


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of a target file and the part of a tensor that it must hold.

    `extent.path` is the target file's name, relative to the target folder; a dtype other than the tensor's own
    means a cast.
    """

    key: Key
    region: Region
    extent: Extent


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to be written: its size, the bytes that are known now, by offset, and the slots to be filled.

    `zeros` are ranges (offset, length) that stay zero: padding between and behind tensors.
    """

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    slots: tuple[Slot, ...] = ()
    zeros: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> TargetFile:
        return cls(name, len(content), ((0, content),))


@dataclass(frozen=True, slots=True)
class Target:
    """Everything a writer wants written.

    `left_out` are tensors that are not written, each with the sentence that tells the user why; any other tensor that
    the plan cannot prove to be placed stops the conversion.  `dropped` names what is no tensor and has no place in this
    format; `notes` is what the user should know about the choice that was made (which precision, which names).
    """

    files: tuple[TargetFile, ...]
    left_out: Mapping[Key, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def not_written(self) -> tuple[str, ...]:
        """Everything of the source that is not in the target, a line each."""
        return (*self.dropped, *dict.fromkeys(self.left_out.values()))


class Format(Protocol):
    """A checkpoint format.  One module in `converters/`, one line in the registry."""

    name: str
    title: str
    reads: bool
    writes: bool
    #: Whether it has a place for optimizer states; a plan proves that each is placed in one that has.
    carries_optimizer: bool
    #: The namespace that what is written must have; None takes any.
    namespace: str | None

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The checkpoint of this format that `path` is, or records as its latest one; None if there is none.

        Cheap: names and small files only.  Where these do not tell apart formats of one family, each of them returns
        the folder, and `read` describes it as what it is.  Raises CorruptError where the record is there and
        contradicts the folder.
        """
        ...

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint that `find` returned, without reading tensor data."""
        ...

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Say which files this format needs for `checkpoint` and what each byte of them must hold."""
        ...
