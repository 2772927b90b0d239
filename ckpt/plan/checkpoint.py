"""The description of a whole checkpoint, the layout of a target, and the protocol that a format implements.

A reader turns files into a `Checkpoint`; a writer turns a `Checkpoint` into a `Target`.  Neither moves tensor
data, and neither knows which other formats exist.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ckpt.base.errors import CorruptError, SourceGoneError, UsageError
from ckpt.base.text import counted
from ckpt.plan.dtypes import DType
from ckpt.plan.loads import Loads
from ckpt.plan.options import OF_FILES, Options, read_options
from ckpt.plan.tensors import Extent, Region, Shape, Tensor

#: Roles with a meaning of their own, those of the model itself; every other role is the name of an optimizer state.
WEIGHT, MASTER, BUFFER = MODEL_ROLES = ("weight", "master", "buffer")

#: Names of parameters: as the Hub's files spell them, as transformers' modules spell them in memory, as
#: megatron-core's GPTModel does with its layers and experts numbered over the whole model, or as the model at hand
#: does, when nothing more is known of it.
HUB, TRANSFORMERS, MEGATRON, OWN = "hub", "transformers", "megatron", "own"

#: Megatron-LM's arguments that tell the sizes of its axes (megatron/training/arguments.py).
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
    """Hyperparameters (`lr`, `betas`, ...) and the parameters that they apply to, by fqn."""

    fqns: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OneElement:
    """An optimizer state that is one number and stored as a tensor, of shape () or [1].

    The optimizer that wrote it changes it in place, so it stays one; of Adam's `step` each engine has its own form.
    """

    value: int | float | bool
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything of a run that is not a tensor of a parameter.  A field is None where nothing of the kind is recorded.

    What no field has the meaning of is in `private`, by the engine that understands it; any other's writer lists it as
    left out, or hands it to the user.  Fields that are entries of files have the names that these have there.
    """

    #: Optimizer steps taken, with those that an overflow made void.
    step: int | None = None
    param_groups: tuple[ParamGroup, ...] = ()
    #: Optimizer states that are one number per parameter, by state and fqn: Adam's `step`.  Other than `step`, a
    #: `OneElement` where that is a tensor.
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Who recorded it: `deepspeed`, `megatron`, `torch` (its state dicts, whoever saved them).
    engine: str | None = None
    #: The version of `engine` that the files record.
    engine_version: str | None = None
    #: DeepSpeed: the stage, 1 to 3, by which the optimizer was partitioned.  The config may say another one.
    zero_stage: int | None = None
    #: DeepSpeed: whether frozen parameters were saved, too; None where nothing tells.
    frozen_saved: bool | None = None
    #: An LR schedule that counts optimizer steps: torch's (`last_epoch`) or DeepSpeed's (`last_batch_iteration`).
    lr_scheduler: Any = None
    #: Megatron's LR and weight decay schedule, which counts sequences (`num_steps`).
    opt_param_scheduler: Any = None
    #: DeepSpeed's loss scaler: a Record of one of its classes.
    loss_scaler: Any = None
    #: Megatron's loss scaler: a dict with `scale`.
    grad_scaler: Any = None
    #: Sequences consumed, as DeepSpeed counts them: a number, or a stored tensor of one.
    global_samples: Any = None
    #: DeepSpeed: how many of `step` an overflow made void.
    skipped_steps: Any = None
    #: What a torch trainer counts, in optimizer steps (`step`) and sequences (`sequences`).
    train_state: Mapping[str, Any] | None = None
    #: DeepSpeed: the position of its data sampler (curriculum learning).
    data_sampler: Any = None
    #: DeepSpeed: the schedule of random layerwise token dropping.
    random_ltd: Any = None
    #: Megatron-LM's arguments by name: `tensor_model_parallel_size`, `consumed_train_samples` in sequences.
    args: Mapping[str, Any] | None = None
    #: The config that DeepSpeed's engine ran with.
    ds_config: Mapping[str, Any] | None = None
    #: What the user handed to DeepSpeed's `save_checkpoint`, or a script to Megatron-DeepSpeed.
    client_state: Mapping[str, Any] | None = None
    #: Entries of the model's state dict that are no tensors (`_extra_state`), by fqn.
    extra_state: Mapping[str, Any] | None = None
    #: What each rank has for itself, by entry (`rng_state`) and by the name that the rank has in the format.
    per_rank: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What only one engine understands: by engine, and by the entry's name in its files.
    private: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_entries(cls, engine: str, entries: Mapping[str, Any], **fields: Any) -> TrainingState:
        """The state that `engine` recorded: `entries` of its files in the fields of their names, the rest `private`.

        `fields` are what the files have elsewhere.  An entry that is no mapping where its field is one, or whose field
        is known from elsewhere, is private.
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
        """All that is recorded beside tensors, steps and hyperparameters, by the names in the engines' files.

        A private entry whose name is taken has its engine's before it.
        """
        found = {name: value for name in _ENTRIES if (value := getattr(self, name)) is not None} | dict(self.per_rank)
        for engine, own in self.private.items():
            found |= {f"{engine}.{name}" if name in found else name: value for name, value in own.items()}
        return found


#: Fields that are entries of files: mappings, and others.
_MAPPINGS = ("train_state", "args", "ds_config", "client_state", "extra_state")
_ENTRIES = (
    *("lr_scheduler", "opt_param_scheduler", "loss_scaler", "grad_scaler"),
    *("global_samples", "skipped_steps", "data_sampler", "random_ltd", *_MAPPINGS),
)
#: Private entries that tell whose they are where files of torch's carry them from one engine to another.
_OWNERS = {
    **dict.fromkeys(("dynamic_loss_scale", "overflow", "clip_grad"), "deepspeed"),
    "checkpoint_version": "megatron",
    "pipeline": "megatron-deepspeed",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when its metadata was read; a change of any field means that it has been replaced."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    #: Of the last change of anything; who rewrites a file can put its mtime back, and not this.
    ctime_ns: int = 0

    @classmethod
    def stat(cls, path: str) -> SourceFile:
        info = os.stat(path)
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns)

    def facts(self) -> str:
        return f"{counted(self.size, 'byte')}, mtime {self.mtime_ns} ns, ctime {self.ctime_ns} ns, inode {self.inode}"

    def check_unchanged(self) -> None:
        try:
            now = SourceFile.stat(self.path)
        except FileNotFoundError:
            raise SourceGoneError(
                "the file has gone while it was being read",
                path=self.path,
                expected=self.facts(),
                found="no file",
                hint="is the disk away? the same command goes on when it is back",
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
class Given:
    """What the user named: all `places`, run folders and adapters among them, and the folder of the model's config."""

    places: tuple[str, ...] = ()
    config: str | None = None


class ComputesIn(NamedTuple):
    """The 16-bit dtype that a run computes in though its weights are kept in float32 alone, and what records it.

    `dtype` is None where such a run may compute in one, and nothing records it.
    """

    dtype: DType | None
    record: str = ""


@dataclass(frozen=True, slots=True)
class QuantizedStates:
    """The optimizer states that are stored quantized; their tensors are of the plain values, which are computed.

    `methods` says by which method each is, `blocks` how it is stored, where that is known: for writers of formats that
    have a place for it (`carries_blocks`).
    """

    methods: Mapping[Key, str] = field(default_factory=dict)
    blocks: Mapping[Key, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A lazy description of a checkpoint: which bytes of which files hold which part of which tensor.

    `format` names the format that read it, `framework` who wrote it, as far as it says so.  Both are for people, as
    `notes` and `passed_over` are: no writer asks for them.  What a writer has to know is a field of its own, here or in
    `state`.  `ties` maps an alias to the fqn that owns the tensor, as the checkpoint records it.  `passed_over` says
    which newer checkpoints of the run are not the one that was taken, and why: the user is told even where notes are
    not wanted.  `unread` is what no tensor is made of, a sentence for each: a plan says that it is not in the target.
    """

    path: str
    format: str
    tensors: Mapping[Key, Tensor]
    files: tuple[SourceFile, ...]
    framework: str | None = None
    #: The name of the step's folder in the run's, where the engine names steps (DeepSpeed).
    tag: str | None = None
    world_size: int | None = None
    #: Whether its engine loads it on the ranks that wrote it alone, though others of its format on any.
    bound_to_ranks: bool = False
    namespace: str = OWN
    ties: Mapping[str, str] = field(default_factory=dict)
    state: TrainingState = field(default_factory=TrainingState)
    #: Whether it is an adapter without the model that it adapts, under the names of PEFT's files or a namespace's own.
    is_adapter: bool = False
    #: What PEFT's `adapter_config.json` would say of an adapter that another trainer configured otherwise.
    adapter_config: Mapping[str, Any] | None = None
    #: Names of the options for reading that had a meaning.
    used_options: frozenset[str] = frozenset()
    #: Recorded settings that the user has accepted, though the target cannot hold them.
    accepted: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    #: The places in which the run's other files (config, tokenizer) may stand, nearest first.
    folders: tuple[str, ...] = ()
    #: Nothing is written into a place that the user named, nor over one.
    given: Given = Given()
    computes_in: ComputesIn | None = None
    notes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    #: Reason why the optimizer that the run had is not here, or None.
    missing_optimizer: str | None = None
    #: Functions that return the bytes of made-up paths.  An extent with such a path is computed when it is written; a
    #: merged LoRA weight is one.
    computed: Mapping[str, Callable[[], memoryview]] = field(default_factory=dict)
    quantized: QuantizedStates = QuantizedStates()
    #: Names of tensors that `--dtype` never casts: the parts of quantized weights.
    uncast: frozenset[str] = frozenset()
    #: What a family's readers tell its own writers, an object of that family's (`facts_of`).
    facts: Any = None

    def facts_of(self, family: type[Facts]) -> Facts:
        """The facts of this family's; those of nothing known where another one's reader made this."""
        return self.facts if isinstance(self.facts, family) else family()

    def holds(self, names: Iterable[str]) -> bool:
        """Return True if there are tensors of all `names`, possibly behind path prefixes."""
        known = [fqn.split(".") for fqn in {fqn for fqn, _ in self.tensors} | self.ties.keys()]
        return {".".join(parts[start:]) for parts in known for start in range(len(parts))}.issuperset(names)

    def get(self, fqn: str, role: str) -> Tensor | None:
        return self.tensors.get((fqn, role))

    def with_role(self, *roles: str) -> Iterator[Tensor]:
        return (tensor for (_, role), tensor in self.tensors.items() if role in roles)

    @property
    def run_folders(self) -> tuple[str, ...]:
        """The `folders` with the run's own files: without the one given for the config, where that is another run's."""
        if self.given.config is None:
            return self.folders
        path, given = Path(self.path), Path(self.given.config)
        return tuple(one for one in self.folders if not given.is_relative_to(one) or path.is_relative_to(one))

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes by fqn; an optimizer's states may have shapes of their own, and have the last word nowhere."""
        states_first = sorted(self.tensors.values(), key=lambda tensor: tensor.role in MODEL_ROLES)
        return {tensor.fqn: tensor.shape for tensor in states_first}

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
        roles = {role for _, role in self.tensors}.difference(MODEL_ROLES)
        return tuple(sorted(roles | set(self.state.scalars)))

    def with_plain_states(self) -> Checkpoint:
        """This with fp32 values in place of optimizer states that are stored quantized (torchao, bitsandbytes).

        They have the bits that the library computes.
        """
        counts = Counter(self.quantized.methods.values())
        notes = [
            f"{counted(count, 'optimizer state')} dequantized from {method} to float32"
            for method, count in counts.items()
        ]
        return replace(self, quantized=QuantizedStates(), notes=(*self.notes, *notes))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What the user said about the source: `tag` of the step folder, and the folder or file of the model's config.

    `accepted` are names of recorded settings to ignore.  `options` are those that formats declare for reading, by name
    (see `ckpt.plan.options`).
    """

    tag: str | None = None
    config: Path | None = None
    accepted: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, declaration: type[Options]) -> Options:
        """Return the given options of those that a format declares, as its dataclass."""
        return read_options(declaration, self.options)


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
        return read_options(declaration, self.options)

    def of_files(self) -> dict[str, Any]:
        """The options of `ckpt.plan.options.OF_FILES` that were asked for, by name."""
        usual = Layout()
        return {name: getattr(self, name) for name in OF_FILES if getattr(self, name) != getattr(usual, name)}

    def num_ranks(self, checkpoint: Checkpoint) -> int:
        """The number of ranks to write files for.  UsageError if neither the source nor the user gives it."""
        found = self.world_size or checkpoint.world_size
        if found is None:
            what, hint = "the source has no number of ranks of its own", "--world-size says how many there are"
            raise UsageError(what, hint=hint)
        return found


class Slot(NamedTuple):
    """A range of a target file and the part of a tensor that it must hold.

    `extent.path` is the target file's name, relative to the target folder; a dtype other than the tensor's own
    means a cast.
    """

    key: Key
    region: Region
    extent: Extent


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file of the target: its size, the bytes that are known now, by offset, and the slots to be filled.

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
    `is_rearranged` says that its tensors are parts of the source's, so that read back they are not compared with these.
    `loads` is the proved answer to: can a library load the folder?  None for formats that have no such library.
    """

    files: tuple[TargetFile, ...]
    left_out: Mapping[Key, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_rearranged: bool = False
    loads: Loads | None = None

    @property
    def not_written(self) -> tuple[str, ...]:
        """Everything of the source that is not in the target, a line each."""
        return (*self.dropped, *dict.fromkeys(self.left_out.values()))


class Format(Protocol):
    """A checkpoint format, a subclass of this: one module in `converters/`, one line in the registry.

    All that it can do is listed here, with what most formats do; a format says where it differs.
    """

    name: str
    title: str
    #: Other names that users type for it.  Formats of one family may share one, which then means all that are read.
    aliases: tuple[str, ...] = ()
    #: The namespace that what is written must have; None takes any.
    namespace: str | None
    reads: bool = True
    writes: bool = True
    #: Whether it has a place for optimizer states; a plan proves that each is placed in one that has.
    carries_optimizer: bool = True
    #: Whether it has a place for optimizer states that are stored quantized, in blocks.
    carries_blocks: bool = False
    #: Whether a model with quantized weights has a place in it.
    carries_quantized: bool = False
    #: Whether there is an optimizer in each checkpoint, also where nothing tells which parameters its states are of.
    always_has_optimizer: bool = False
    #: The files record the shape of every parameter, and the reader compares it with the parameter's parts.
    records_shapes: bool = False
    #: What an engine is given to load a step: its own folder, or the run's, whose record names the step.
    loads_from: Literal["step", "run"] = "step"
    #: Whether an engine on another number of ranks than wrote it loads it, and one with other sizes of Megatron's axes.
    fits_other_ranks: bool = True
    fits_other_axes: bool = False
    #: Whether files say for how many ranks they are, although they fit others.
    records_ranks: bool = False
    #: Those of `ckpt.plan.options.OF_FILES` that say something about what it writes; others are refused.
    takes: tuple[str, ...] = ()
    #: Where its ranks stand on Megatron's axes: `all` on all of them, `model` one for all data parallel ranks of a tp
    #: and pp rank; None where that is not known.
    ranks_on_axes: Literal["all", "model"] | None = None

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The checkpoint of this format that `path` is, or records as its latest one; None if there is none.

        Cheap: names and small files only.  Where these do not tell apart formats of one family, each of them returns
        the folder, and `read` describes it as what it is.  Raises CorruptError where the record is there and
        contradicts the folder.
        """

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint that `find` returned, without reading tensor data."""

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Say which files this format needs for `checkpoint` and what each byte of them must hold."""
