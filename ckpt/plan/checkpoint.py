"""Descriptions of checkpoints, layouts and targets, and the protocol for formats.

A reader turns files into a `Checkpoint`. A writer turns a `Checkpoint` into a `Target`. Neither moves tensor data.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ckpt.base.errors import CkptError, CorruptError, SourceGoneError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.dtypes import FLOAT32, UINT8, DType
from ckpt.plan.load_check import LoadCheck
from ckpt.plan.options import OF_FILES, Options, read_options
from ckpt.plan.tensors import Extent, Region, Shape, Tensor

#: Every other role is an optimizer state's name.
WEIGHT, MASTER, BUFFER = MODEL_ROLES = ("weight", "master", "buffer")

#: Reasons in `Checkpoint.uncast`.
PART, FIXED = "part", "fixed"

#: Namespaces for parameters: the Hub's files, transformers' modules in memory, megatron-core's GPTModel (with global
#: layer and expert numbers), or the model's own unknown names.
HUB, TRANSFORMERS, MEGATRON, OWN = "hub", "transformers", "megatron", "own"

#: Megatron-LM's arguments (megatron/training/arguments.py).
AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}

Key = tuple[str, str]  # (fqn, role)
Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Hyperparameters (`lr`, `betas`, ...) and the fqns of their parameters."""

    fqns: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OneElement:
    """A one-number optimizer state in a tensor with shape () or [1], because the optimizer changes it in place."""

    value: int | float | bool
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run's state apart from its parameters' tensors.

    Entries without a field are in `private`. Another engine's writer reports them as left out. A field for a file's
    entry has the entry's name.
    """

    #: Optimizer steps, including steps skipped after an overflow.
    step: int | None = None
    param_groups: tuple[ParamGroup, ...] = ()
    #: One-number optimizer states, by state and fqn. States other than `step` are `OneElement` if stored as a tensor.
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: `deepspeed`, `megatron`, or `torch` (its state dicts, whoever saved them).
    engine: str | None = None
    engine_version: str | None = None
    #: The stage (1 to 3) used for partitioning. DeepSpeed's config may have another value.
    zero_stage: int | None = None
    #: DeepSpeed: True if frozen parameters were saved too, None if unknown.
    frozen_saved: bool | None = None
    #: LR schedule counted in optimizer steps: torch's (`last_epoch`) or DeepSpeed's (`last_batch_iteration`).
    lr_scheduler: Any = None
    #: Megatron's LR and weight decay schedule, counted in sequences (`num_steps`).
    opt_param_scheduler: Any = None
    loss_scaler: Any = None
    #: A dict with `scale`.
    grad_scaler: Any = None
    #: Sequences consumed in DeepSpeed's count: a number, or a stored tensor with one.
    global_samples: Any = None
    #: Steps in `step` that DeepSpeed skipped after an overflow.
    skipped_steps: Any = None
    #: A torch trainer's counts, in optimizer steps (`step`) and sequences (`sequences`).
    train_state: Mapping[str, Any] | None = None
    #: DeepSpeed's data sampler (curriculum learning).
    data_sampler: Any = None
    #: DeepSpeed: schedule for random layerwise token dropping.
    random_ltd: Any = None
    #: Megatron-LM's arguments by name. `consumed_train_samples` is in sequences.
    args: Mapping[str, Any] | None = None
    ds_config: Mapping[str, Any] | None = None
    #: The user's argument to DeepSpeed's `save_checkpoint`, or a script's to Megatron-DeepSpeed.
    client_state: Mapping[str, Any] | None = None
    #: Non-tensor entries in the model's state dict (`_extra_state`), by fqn.
    extra_state: Mapping[str, Any] | None = None
    #: By entry (`rng_state`) and by the format's name for the rank.
    per_rank: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: By engine and name.
    private: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_entries(cls, engine: str, entries: Mapping[str, Any], **fields: Any) -> TrainingState:
        """Return the state recorded by `engine`: known entries become fields, the rest `private`.

        An entry stays private if its field needs a mapping and it is none, or if `fields` already sets it.
        """
        private: dict[str, dict[str, Any]] = {}
        for name, value in entries.items():
            is_of_kind = name not in _MAPPINGS or isinstance(value, Mapping)
            if name in _ENTRIES and is_of_kind and fields.get(name) is None:
                fields[name] = value
            else:
                private.setdefault(_OWNERS.get(name, engine), {})[name] = value
        return cls(engine=engine, private=private, **fields)

    def entries(self) -> dict[str, Any]:
        """Return all entries except tensors, steps and hyperparameters.

        If a name is taken, its engine's name precedes it.
        """
        found = {name: value for name in _ENTRIES if (value := getattr(self, name)) is not None} | dict(self.per_rank)
        for engine, own in self.private.items():
            found |= {f"{engine}.{name}" if name in found else name: value for name, value in own.items()}
        return found


_MAPPINGS = ("train_state", "args", "ds_config", "client_state", "extra_state")
_ENTRIES = (
    *("lr_scheduler", "opt_param_scheduler", "loss_scaler", "grad_scaler"),
    *("global_samples", "skipped_steps", "data_sampler", "random_ltd", *_MAPPINGS),
)
#: Owners for private entries that torch's files may carry from one engine to another.
_OWNERS = {
    **dict.fromkeys(("dynamic_loss_scale", "overflow", "clip_grad"), "deepspeed"),
    "checkpoint_version": "megatron",
    "pipeline": "megatron-deepspeed",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file's state when its metadata was read."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    #: A rewrite can restore mtime, but not ctime.
    ctime_ns: int = 0

    @classmethod
    def stat(cls, path: str) -> SourceFile:
        info = os.stat(path)
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns)

    def facts(self) -> str:
        return f"{pluralize(self.size, 'byte')}, mtime {self.mtime_ns} ns, ctime {self.ctime_ns} ns, inode {self.inode}"

    def check_unchanged(self) -> None:
        try:
            now = SourceFile.stat(self.path)
        except FileNotFoundError:
            raise SourceGoneError(
                "the file has gone while it was being read",
                path=self.path,
                expected=self.facts(),
                found="no file",
                hint="is the disk mounted? rerun the command to continue",
            ) from None
        if now != self:
            raise CorruptError(
                "the file was replaced while it was being read",
                path=self.path,
                expected=self.facts(),
                found=now.facts(),
                hint="is a run still writing into this folder? wait for it, then convert again",
            )


@dataclass(frozen=True, slots=True)
class Inputs:
    """The user's input: all places, including run folders and adapters, and the model config's folder."""

    places: tuple[str, ...] = ()
    config: str | None = None


class ComputesIn(NamedTuple):
    """A run's 16-bit compute dtype, if only float32 weights are stored, and the record with this dtype.

    `dtype` is None if such a run may compute in 16 bits but no record exists.
    """

    dtype: DType | None
    record: str = ""


@dataclass(frozen=True, slots=True)
class QuantizedStates:
    """Optimizer states stored quantized. Their tensors are computed and have the plain values.

    `methods` gives each state's method, `blocks` the stored form for formats that support it (`carries_blocks`).
    """

    methods: Mapping[Key, str] = field(default_factory=dict)
    blocks: Mapping[Key, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Storage of a weight computed from blocks of small numbers with a scale.

    `scales` has every element's scale; None if unknown. `values` are the numbers in order; if empty, they are integers
    with magnitudes up to `span`.
    """

    type: str
    nbytes: int
    scales: Tensor | None = None
    scale_dtype: DType = FLOAT32
    values: tuple[float, ...] = ()
    span: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A lazy description of a checkpoint: the byte ranges that hold each part of each tensor.

    `format` and `framework` are for messages, like `notes` and `passed_over`; no writer uses them. `ties` maps an alias
    to the fqn that owns the tensor. `passed_over` says why newer checkpoints in the run were skipped. `unread` has a
    sentence for each state without a tensor; a plan reports it as left out.

    Example:
        checkpoint.tensors["lm_head.weight", "weight"].shape
        checkpoint.optimizer_states  # ("exp_avg", "exp_avg_sq", "step")
    """

    path: str
    format: str
    tensors: Mapping[Key, Tensor]
    files: tuple[SourceFile, ...]
    framework: str | None = None
    #: The step's folder name in the run's folder, if the engine names steps (DeepSpeed).
    tag: str | None = None
    world_size: int | None = None
    #: True if the engine needs the original ranks, though other checkpoints in this format fit any.
    bound_to_ranks: bool = False
    namespace: str = OWN
    ties: Mapping[str, str] = field(default_factory=dict)
    state: TrainingState = field(default_factory=TrainingState)
    #: True for an adapter without its base model.
    is_adapter: bool = False
    #: PEFT's equivalent `adapter_config.json` if another trainer configured the adapter.
    adapter_config: Mapping[str, Any] | None = None
    #: Reading options that had an effect.
    used_options: frozenset[str] = frozenset()
    #: Recorded settings that the user accepts losing in the target.
    accepted: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    #: Folders that may hold the run's other files (config, tokenizer), nearest first.
    folders: tuple[str, ...] = ()
    #: Output never goes into or over these places.
    given: Inputs = Inputs()
    computes_in: ComputesIn | None = None
    notes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    missing_optimizer: str | None = None
    #: Sentence on weights that the engine expects in its files, and that only the masters replace.
    lost_weights: str = ""
    #: Note on an optimizer whose states could not be mapped to parameters. Its engine may still load them.
    unmapped_optimizer: str = ""
    #: Functions that return a virtual path's bytes on writing, for example merged LoRA weights.
    computed: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)
    quantized: QuantizedStates = QuantizedStates()
    #: Weights stored in blocks, by fqn. Their tensors have the plain values.
    blocks: Mapping[str, StoredBlocks] = field(default_factory=dict)
    #: Error for all uses of the values, if only names and shapes are known.
    unreadable: CkptError | None = None
    #: Tensors that no dtype casts: `PART` of a quantized weight, or `FIXED` by the model's class.
    uncast: Mapping[str, str] = field(default_factory=dict)
    #: True if every buffer has its role, so that other tensors are parameters.
    has_all_buffers: bool = False
    #: From a family's readers to its own writers.
    facts: Any = None

    def facts_of(self, family: type[Facts]) -> Facts:
        """Return this family's facts, or empty ones."""
        return self.facts if isinstance(self.facts, family) else family()

    def holds(self, names: Iterable[str]) -> bool:
        """Return True if there are tensors for all `names`, possibly with path prefixes."""
        known = [fqn.split(".") for fqn in {fqn for fqn, _ in self.tensors} | self.ties.keys()]
        return {".".join(parts[start:]) for parts in known for start in range(len(parts))}.issuperset(names)

    def get(self, fqn: str, role: str) -> Tensor | None:
        return self.tensors.get((fqn, role))

    def with_role(self, *roles: str) -> Iterator[Tensor]:
        return (tensor for (_, role), tensor in self.tensors.items() if role in roles)

    @property
    def run_folders(self) -> tuple[str, ...]:
        """The `folders` without another run's folder given for the config."""
        if self.given.config is None:
            return self.folders
        path, given = Path(self.path), Path(self.given.config)
        return tuple(one for one in self.folders if not given.is_relative_to(one) or path.is_relative_to(one))

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes by fqn. A weight's or master's shape wins over an optimizer state's."""
        states = {fqn: tensor.shape for (fqn, role), tensor in self.tensors.items() if role not in MODEL_ROLES}
        return states | {fqn: tensor.shape for (fqn, role), tensor in self.tensors.items() if role in MODEL_ROLES}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """One tensor per parameter: the model's own weight, or the fp32 master if there is no other."""
        found: dict[str, Tensor] = {}
        for (fqn, role), tensor in self.tensors.items():
            if role == WEIGHT or (role == MASTER and fqn not in found):
                found[fqn] = tensor
        return found

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        """Sorted names of the optimizer states."""
        roles = {role for _, role in self.tensors}.difference(MODEL_ROLES)
        return tuple(sorted(roles | set(self.state.scalars)))

    def with_plain_states(self) -> Checkpoint:
        """Return this checkpoint with optimizer states dequantized to fp32, like torchao and bitsandbytes."""
        counts = Counter(self.quantized.methods.values())
        notes = [
            f"{pluralize(count, 'optimizer state')} dequantized from {method} to float32"
            for method, count in counts.items()
        ]
        return replace(self, quantized=QuantizedStates(), notes=(*self.notes, *notes))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The user's choices for the source: the step folder's `tag`, and the folder or file of the model's config.

    `accepted` names recorded settings to ignore. `options` holds the formats' reading options by name.
    """

    tag: str | None = None
    config: Path | None = None
    accepted: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, declaration: type[Options]) -> Options:
        return read_options(declaration, self.options)


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """The user's choices for a writer: `Layout(dtype=FLOAT32)`, or with the format's options `Layout(tp=2, pp=4)`.

    `dtype` None keeps the model's own. `max_shard_size` is in bytes. `world_size` None keeps the source's number of
    ranks. `options` holds the format's options by name; None values are dropped.
    """

    dtype: DType | None
    max_shard_size: int
    world_size: int | None
    options: Mapping[str, Any]
    quantize: str | None

    def __init__(
        self,
        dtype: DType | None = None,
        max_shard_size: int = 5_000_000_000,
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        quantize: str | None = None,
        **named: Any,
    ) -> None:
        requested = {name: value for name, value in {**(options or {}), **named}.items() if value is not None}
        for name, value in zip(self.__slots__, (dtype, max_shard_size, world_size, requested, quantize), strict=True):
            object.__setattr__(self, name, value)

    def read(self, declaration: type[Options]) -> Options:
        """Return the format's options as its dataclass, without others."""
        return read_options(declaration, self.options)

    def of_files(self) -> dict[str, Any]:
        """Return the requested options from `OF_FILES`."""
        usual = Layout()
        return {name: getattr(self, name) for name in OF_FILES if getattr(self, name) != getattr(usual, name)}

    def num_ranks(self, checkpoint: Checkpoint) -> int:
        """Return the number of ranks to write. Raise UsageError if neither the source nor the user gives it."""
        found = self.world_size or checkpoint.world_size
        if found is None:
            what, hint = "the source has no rank count", Message("pass {world_size=N}")
            raise UsageError(what, hint=hint)
        return found


class Slot(NamedTuple):
    """A range in a target file, and the tensor part it must hold. `extent.path` is relative to the target folder."""

    key: Key
    region: Region
    extent: Extent


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A target file: its size, the known bytes by offset, and the slots to fill.

    `zeros` lists ranges (offset, length) that stay zero. If `copied` is set, the file is a copy of that source file.
    """

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    slots: tuple[Slot, ...] = ()
    zeros: tuple[tuple[int, int], ...] = ()
    copied: SourceFile | None = None

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> TargetFile:
        return cls(name, len(content), ((0, content),))

    @classmethod
    def of_copy(cls, name: str, source: SourceFile) -> TargetFile:
        return cls(name, source.size, copied=source)

    @property
    def filled(self) -> list[Extent]:
        """Ranges with bytes from source files."""
        whole = [] if self.copied is None else [Extent.contiguous(self.name, 0, UINT8, (self.size,))]
        return whole + [slot.extent for slot in self.slots]


@dataclass(frozen=True, slots=True)
class Target:
    """A writer's result: all files to write.

    `left_out` lists tensors that are not written, each with a sentence for the user. Any other tensor that the plan
    can't prove to be placed stops the conversion. `dropped` names other content that this format can't hold. If
    `is_rearranged`, its tensors can't be compared with the source's after reading back. `loads` says if a library can
    load the folder, None if the format has no such library. `rule` is the rounding rule of weights that the writer
    quantizes.
    """

    files: tuple[TargetFile, ...]
    left_out: Mapping[Key, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_rearranged: bool = False
    loads: LoadCheck | None = None
    rule: str = ""

    @property
    def not_written(self) -> tuple[str, ...]:
        return (*self.dropped, *dict.fromkeys(self.left_out.values()))


class Format(Protocol):
    """A checkpoint format. A subclass is one module in `converters/` and one line in the registry."""

    name: str
    title: str
    #: Other names for users to type. Formats may share an alias; it then means all readable ones.
    aliases: tuple[str, ...] = ()
    #: Namespace required for writing. None accepts any.
    namespace: str | None
    reads: bool = True
    writes: bool = True
    #: The plan proves that each optimizer state is placed.
    carries_optimizer: bool = True
    #: True if it holds quantized optimizer states, in blocks.
    carries_blocks: bool = False
    carries_quantized: bool = False
    quantizes: tuple[str, ...] = ()
    #: True if every checkpoint has an optimizer, even without a map from states to parameters.
    always_has_optimizer: bool = False
    #: True if the files record every parameter's shape.
    records_shapes: bool = False
    #: True if it has a folder for each module of sentence-transformers.
    splits_modules: bool = False
    #: Folder that an engine needs to load a step: the step's own, or the run's with its record.
    loads_from: Literal["step", "run"] = "step"
    #: True if an engine loads it on another number of ranks, or with other Megatron axis sizes.
    fits_other_ranks: bool = True
    fits_other_axes: bool = False
    #: True if files record their number of ranks, although they fit others.
    records_ranks: bool = False
    #: From `OF_FILES`. Others are refused.
    takes: tuple[str, ...] = ()
    #: Ranks on Megatron's axes: `all` for all axes, `model` for one rank per tp and pp rank, None if unknown.
    ranks_on_axes: Literal["all", "model"] | None = None

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Return the checkpoint of this format at `path`, or the latest in its record. None if there is none.

        Read names and small files only. If they fit several formats in a family, each returns the folder, and `read`
        identifies it. Raise CorruptError if a record contradicts the folder.
        """

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint that `find` returned, without reading tensor data."""

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Return the files to write for `checkpoint`, and the content of each byte."""
