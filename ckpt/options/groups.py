"""Options that several commands share, and groups of them, which a command takes as one argument each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ckpt.options import completion as complete
from ckpt.plan.options import MAX_SIZE

#: Sections of the help texts, in this order.  Options without one come last, under Options.
READ, WRITTEN, HOW, SHOWN, HUB = SECTIONS = (
    "What is read",
    "What is written",
    "How it is done",
    "What is shown",
    "The Hub",
)

#: What options take, by their names.
DType = Literal["keep", "fp32", "bf16", "fp16"]
Only = Literal["weights", "optimizer", "all"]
Names = Literal["hub", "own"]
ExpertLayout = Literal["peft", "unsloth"]
OptimizerDType = Literal["keep", "fp32"]

#: What is given to be read may not be readable, which is no matter of usage: whoever opens it says so.
PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or the run folder it lies in.", readable=False)
]
FormatOption = Annotated[
    str,
    typer.Option(metavar="FORMAT", help="The format to read.", autocompletion=complete.sources, rich_help_panel=READ),
]
TagOption = Annotated[
    str | None,
    typer.Option(
        "--tag",
        "--step",
        metavar="TAG",
        help="The step to take, by its folder's name or its number, instead of the one recorded as latest.",
        autocompletion=complete.tags,
        rich_help_panel=READ,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="The model's config and tokenizer: a folder, a config.json or a Hub id.",
        rich_help_panel=READ,
    ),
]
ShardSizeOption = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest size of one weight file.", rich_help_panel=WRITTEN)
]
WorkersOption = Annotated[
    int,
    typer.Option(min=0, max=256, help="Threads that copy. 0: 8 on a node, to keep a disk busy.", rich_help_panel=HOW),
]
IgnoreFileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-file",
        metavar="NAME",
        help="Leave out this file next to the adapter, though it holds trained weights. Can be given several times.",
    ),
]
ExpertLayoutOption = Annotated[
    ExpertLayout | None,
    typer.Option(
        "--expert-layout",
        help="Who packed an adapter of stacked experts: peft, or unsloth before 2026.9.6. [default: as recorded]",
        rich_help_panel=READ,
    ),
]
PeftVersionOption = Annotated[
    str | None,
    typer.Option(
        "--peft-version",
        metavar="RELEASE",
        help="PEFT release that trained the adapter, such as 0.13, if its config records none.",
        rich_help_panel=READ,
    ),
]
AcceptEntryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-setting",
        metavar="NAME",
        help="Ignore this unknown entry of adapter_config.json. Repeatable.",
        rich_help_panel=READ,
    ),
]
AcceptSettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-setting",
        metavar="NAME",
        help="Ignore this recorded setting, though it changes the model and the target cannot hold it. Repeatable.",
        rich_help_panel=READ,
    ),
]
DequantizeOption = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Take the plain values of quantized weights (MXFP4, bitsandbytes, FP8).",
        rich_help_panel=WRITTEN,
    ),
]
NamesOption = Annotated[
    Names,
    typer.Option(
        help="hub: only what the config's architecture saves. own: other names are written as they are.",
        rich_help_panel=WRITTEN,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors and warnings of loss only.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Print every tensor or file.")]


# Groups of options, which a command takes as one argument each (`with_options`).


@dataclass(frozen=True)
class ReadOptions:
    """Options for the checkpoint that is read."""

    format: FormatOption = "auto"
    tag: TagOption = None
    config: ConfigOption = None
    accept_setting: AcceptSettingOption = None


@dataclass(frozen=True)
class Sides:
    """Options for the two checkpoints of a comparison."""

    from_a: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="The format of A.", autocompletion=complete.sources, rich_help_panel=READ),
    ] = "auto"
    from_b: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="The format of B.", autocompletion=complete.sources, rich_help_panel=READ),
    ] = "auto"
    tag_a: Annotated[
        str | None,
        typer.Option(
            "--tag-a", "--step-a", metavar="TAG", help="The step of A, by name or number.", rich_help_panel=READ
        ),
    ] = None
    tag_b: Annotated[
        str | None,
        typer.Option(
            "--tag-b", "--step-b", metavar="TAG", help="The step of B, by name or number.", rich_help_panel=READ
        ),
    ] = None
    config: ConfigOption = None
    accept_setting: AcceptSettingOption = None


@dataclass(frozen=True)
class Precision:
    """The precision in which weights are written."""

    dtype: Annotated[
        DType,
        typer.Option(
            help="Precision of weights: keep the model's own, or cast. fp32 takes the optimizer's masters.",
            rich_help_panel=WRITTEN,
        ),
    ] = "keep"
    dequantize: DequantizeOption = False


@dataclass(frozen=True)
class Sharding:
    """The files into which a target is cut."""

    max_shard_size: ShardSizeOption = "5GB"
    world_size: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            "--world-size",
            min=1,
            max=MAX_SIZE,
            help="Ranks of a sharded target. [default: as many as the source has]",
            rich_help_panel=WRITTEN,
        ),
    ] = None


@dataclass(frozen=True)
class Outcome:
    """What is done with a plan, and what is printed of it."""

    manifest: Annotated[
        bool,
        typer.Option(
            help="Write ckpt-manifest.json, the digests of what was written, for `ckpt verify`.",
            rich_help_panel=WRITTEN,
        ),
    ] = True
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=HOW)
    ] = False
    as_json: JsonOption = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.", rich_help_panel=WRITTEN)
    ] = False
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Clear what a stopped conversion has kept for this output, and begin anew. [default: go on with it; "
            "in a store nothing is kept]",
            rich_help_panel=HOW,
        ),
    ] = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read back what was written, and compare it with the source. Exit code 1: different.",
            rich_help_panel=HOW,
        ),
    ] = False
    quiet: QuietOption = False
    verbose: VerboseOption = False


@dataclass(frozen=True)
class HubTarget:
    """Where on the Hub a folder is pushed to."""

    repo_id: Annotated[
        str | None,
        typer.Option(
            "--repo-id",
            metavar="ORG/NAME",
            help="The repository on the Hub. [default: the run's hub_model_id; for a merge, with -merged behind it]",
            rich_help_panel=HUB,
        ),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.", rich_help_panel=HUB)] = (
        False
    )
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="The branch to push to, made where it is missing.", rich_help_panel=HUB),
    ] = None
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Push as a pull request against main.", rich_help_panel=HUB)
    ] = False
    commit_message: Annotated[
        str | None,
        typer.Option("--commit-message", metavar="TEXT", help="Commit message on the Hub.", rich_help_panel=HUB),
    ] = None


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command, with the options of its groups each by its own name."""
    return {
        name: value
        for key, argument in arguments.items()
        for name, value in (vars(argument) if is_dataclass(argument) else {key: argument}).items()
    }
