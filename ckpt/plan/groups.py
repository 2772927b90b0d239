"""Option groups shared by functions and the command line.

`keywords.py` has their types for editors and mypy; `tests/api/test_keywords.py` generates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

from ckpt.base.flags import HOW, HUB, READ, SHOWN, WRITTEN, Flag, OptionGroup
from ckpt.plan.options import MAX_SIZE

if TYPE_CHECKING:
    from ckpt.plan.checkpoint import Checkpoint  # the help of `ckpt` needs no checkpoint

Config = str | PathLike[str] | None
Cast = Literal["keep", "fp32", "bf16", "fp16"]
Quantized = Literal["fp8-block", "fp8-dynamic", "int8", "mxfp4", "nvfp4a16", "f32", "f16", "bf16", "q8_0"]
Only = Literal["weights", "optimizer", "all"]
Names = Literal["hub", "own"]
ExpertLayout = Literal["peft", "unsloth"]
Progress = Callable[[int], None]  # gets the bytes since the last call
Model = Union[str, PathLike[str], "Checkpoint", None]
OptionValue = str | int | float | None  # a bool is an int

#: Each command adds its help.
WORLD_SIZE = Flag(("--gpus", "--world-size"), min=1, max=MAX_SIZE, section=WRITTEN)

FormatOption = Annotated[str, Flag(metavar="FORMAT", help="The format to read.", complete="sources", section=READ)]
TagOption = Annotated[
    str | None,
    Flag(
        ("--tag", "--step"),
        metavar="TAG",
        help="Use this step (folder name or number) instead of the recorded latest step.",
        complete="tags",
        section=READ,
    ),
]
ConfigOption = Annotated[
    Config,
    Flag(metavar="CONFIG", help="The model's config and tokenizer: a folder, a config.json or a Hub id.", section=READ),
]
ShardSizeOption = Annotated[str | int, Flag(metavar="SIZE", help="Maximum size per weight file.", section=WRITTEN)]
WorkersOption = Annotated[
    int, Flag(min=0, max=256, help="Copy threads. 0: 8 per node, to keep a disk busy.", section=HOW)
]
IgnoreFilesOption = Annotated[
    Sequence[str] | None,
    Flag(
        ("--ignore-file",),
        metavar="NAME",
        help="Skip this file next to the adapter, although it has trained weights. Repeatable.",
    ),
]
ExpertLayoutOption = Annotated[
    ExpertLayout | None,
    Flag(
        help="Packing of a stacked experts adapter: peft, or unsloth before 2026.9.6. [default: recorded]",
        section=READ,
    ),
]
PeftVersionOption = Annotated[
    str | None,
    Flag(
        metavar="RELEASE",
        help="The adapter's PEFT release, for example 0.13, if its config does not record it.",
        section=READ,
    ),
]
AcceptSettingsOption = Annotated[
    Sequence[str] | None,
    Flag(
        ("--accept-setting",),
        metavar="NAME",
        help="Ignore this recorded setting, although it changes the model and the target can't hold it. Repeatable.",
        section=READ,
    ),
]
DequantizeOption = Annotated[bool, Flag(help="Convert quantized weights to plain values.", section=WRITTEN)]
QuantizeOption = Annotated[
    Quantized | None,
    Flag(
        metavar=f"<{'|'.join(get_args(Quantized))}>",
        help="Quantize attention and MLP weights. The types from f32 to q8_0, and mxfp4, are for llama.cpp.",
        section=WRITTEN,
    ),
]
LikeOption = Annotated[
    Model,
    Flag(
        metavar="MODEL",
        help="Quantize the same weights in the same way as this model, a folder or a cached Hub id. Its bytes are kept "
        "for unchanged rows.",
        section=WRITTEN,
    ),
]
NamesOption = Annotated[
    Names,
    Flag(
        help="hub: only names from the config's architecture. own: write other names unchanged.",
        section=WRITTEN,
    ),
]


@dataclass(frozen=True)
class Selection(OptionGroup):
    format: FormatOption = "auto"
    tag: TagOption = None
    config: ConfigOption = None
    accept_settings: AcceptSettingsOption = None


@dataclass(frozen=True)
class ReadOptions(OptionGroup):
    tag: TagOption = None
    config: ConfigOption = None
    replica: Annotated[
        int | None,
        Flag(metavar="RANK", help="If copies differ between ranks, use this rank's copy.", section=READ),
    ] = None
    accept_settings: AcceptSettingsOption = None


@dataclass(frozen=True)
class Completion(OptionGroup):
    complete_from: Annotated[
        Model,
        Flag(
            metavar="BASE",
            help="Take parts missing from the run's model (a frozen tower, multi-token prediction) from this model.",
            section=READ,
        ),
    ] = None


@dataclass(frozen=True)
class Sides(OptionGroup):
    from_a: Annotated[str, Flag(metavar="FORMAT", help="The format of A.", complete="sources", section=READ)] = "auto"
    from_b: Annotated[str, Flag(metavar="FORMAT", help="The format of B.", complete="sources", section=READ)] = "auto"
    tag_a: Annotated[
        str | None,
        Flag(("--tag-a", "--step-a"), metavar="TAG", help="The step of A, by name or number.", section=READ),
    ] = None
    tag_b: Annotated[
        str | None,
        Flag(("--tag-b", "--step-b"), metavar="TAG", help="The step of B, by name or number.", section=READ),
    ] = None
    config: ConfigOption = None
    accept_settings: AcceptSettingsOption = None


@dataclass(frozen=True)
class Comparison(OptionGroup):
    only: Annotated[Only, Flag(help="Compare only these tensors.", section=SHOWN)] = "all"
    cast: Annotated[bool, Flag(help="If dtypes differ, round the wider side before comparing.", section=HOW)] = False
    exact: Annotated[bool, Flag(help="Round nothing: float32 masters differ from 16-bit weights.", section=HOW)] = False


@dataclass(frozen=True)
class Measuring(OptionGroup):
    progress: Progress | None = None
    expected: Progress | None = None


@dataclass(frozen=True)
class Precision(OptionGroup):
    dtype: Annotated[
        Cast,
        Flag(
            help="Dtype for weights: keep the model's own, or cast. fp32 writes the optimizer's masters.",
            section=WRITTEN,
        ),
    ] = "keep"
    dequantize: DequantizeOption = False
    quantize: QuantizeOption = None
    like: LikeOption = None


@dataclass(frozen=True)
class StatePrecision(OptionGroup):
    optimizer_dtype: Annotated[
        Literal["keep", "fp32"],
        Flag(
            help="fp32 converts 8-bit and 4-bit optimizer states (torchao, bitsandbytes) to plain values.",
            section=WRITTEN,
        ),
    ] = "keep"


@dataclass(frozen=True)
class Sharding(OptionGroup):
    max_shard_size: ShardSizeOption = "5GB"
    world_size: Annotated[
        int | None, replace(WORLD_SIZE, help="Number of ranks for a sharded target. [default: the source's]")
    ] = None


@dataclass(frozen=True)
class Work(OptionGroup):
    max_memory: Annotated[str | int, Flag(metavar="SIZE", help="Limit for all buffers together.", section=HOW)] = (
        "512MB"
    )
    workers: WorkersOption = 0


@dataclass(frozen=True)
class Planning(Work, Sharding, StatePrecision, Precision, Completion, ReadOptions):
    """Everything about a conversion except its destination. Fields of the last base come first."""


@dataclass(frozen=True)
class Check(OptionGroup):
    check: Annotated[bool, Flag(help="First compare all fp32 masters with the stored weights.", section=HOW)] = False


@dataclass(frozen=True)
class WriteOptions(OptionGroup):
    manifest: Annotated[
        bool,
        Flag(
            ("--manifest/--no-manifest",),
            help="Write ckpt-manifest.json with the output's digests, for `ckpt verify`.",
            section=WRITTEN,
        ),
    ] = True
    overwrite: Annotated[bool, Flag(help="Replace a checkpoint at the output.", section=WRITTEN)] = False
    restart: Annotated[
        bool,
        Flag(
            help="Discard the work of a stopped conversion to this output, and start over. [default: continue it; "
            "stores keep nothing]",
            section=HOW,
        ),
    ] = False
    verify: Annotated[
        bool,
        Flag(help="Read back the output, and compare it with the source. Exit code 1: different.", section=HOW),
    ] = False


@dataclass(frozen=True)
class Processes(OptionGroup):
    group: Any = None  # a `ckpt.processes.group.Alone`


@dataclass(frozen=True)
class Watching(OptionGroup):
    progress: Progress | None = None
    phase: Callable[[str, int], None] | None = None
    say: Callable[[str], None] | None = None
    planned: Callable[[Any], None] | None = None

    def callbacks(self, conversion: Any) -> dict[str, Any]:
        """Call `planned`, and return the other callbacks as keywords for writing."""
        if self.planned is not None:
            self.planned(conversion)
        return {name: one for name, one in vars(self).items() if one is not None and name != "planned"}


@dataclass(frozen=True)
class HubTarget(OptionGroup):
    repo_id: Annotated[
        str | None,
        Flag(
            metavar="ORG/NAME",
            help="Repository on the Hub. [default: the run's hub_model_id; a merge adds -merged]",
            section=HUB,
        ),
    ] = None
    private: Annotated[bool, Flag(help="Make a new repository private.", section=HUB)] = False
    revision: Annotated[
        str | None, Flag(metavar="BRANCH", help="Branch to push to, created if missing.", section=HUB)
    ] = None
    create_pr: Annotated[bool, Flag(help="Push as a pull request against main.", section=HUB)] = False
    commit_message: Annotated[str | None, Flag(metavar="TEXT", help="Commit message on the Hub.", section=HUB)] = None
