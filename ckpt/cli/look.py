"""`ckpt inspect`, `ckpt estimate` and `ckpt formats`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.base.errors import CorruptError, UnsafeError, UsageError, printable, shown
from ckpt.cli import complete
from ckpt.cli import options as opt
from ckpt.cli.drawn import check_place, write
from ckpt.cli.text import print_lines, print_table, say_notes, terminal_width
from ckpt.commands.estimate.setup import Device, Optimizer, StateDType, TrainDType

if TYPE_CHECKING:
    from ckpt.commands.check.checking import Checked
    from ckpt.commands.inspect.inspecting import Inspection
    from ckpt.plan.checkpoint import Checkpoint
    from ckpt.plan.tiling import Damage


@dataclass(frozen=True)
class Drawn:
    """The files that show a checkpoint."""

    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw who holds what; exit code 4 if something is damaged.")
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a page to search and zoom; exit code as --picture.")
    ] = None
    only: Annotated[opt.Only, typer.Option(help="Draw only these tensors.")] = "all"
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing picture or page.")] = False

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise UsageError where what is asked for cannot be written."""
        for place, suffix in ((self.picture, ".svg"), (self.html, ".html")):
            if place is not None:
                check_place(place, suffix, checkpoint)


def inspect(
    *,
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    config: opt.ConfigOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="List these tensors and where each of their parts lies; a pattern as '*.q_proj.weight'; repeatable.",
            autocompletion=complete.tensors,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Cut no list and no value short.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print a table as CSV, a row for each tensor.")] = False,
    drawn: Drawn,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Show what a checkpoint holds, and with --picture or --html which ranks hold which parts of it."""
    from ckpt.commands.inspect import inspecting, overview
    from ckpt.move.listing import listed_once

    if drawn.picture is None and drawn.html is None and (drawn.only != "all" or drawn.overwrite):
        raise UsageError("--only and --overwrite go with --picture or --html")
    if csv and as_json:
        raise UsageError("--csv and --json are two forms of one table", hint="give one of them")
    with listed_once():
        try:
            found = inspecting.inspect(
                path, format, tag=tag, config=config, tensors=tensors, tensor=tensor or (), everything=everything
            )
        except (CorruptError, UnsafeError):  # it is about the newest; the table is of the others too
            if run := inspecting.run_of(path, tag, everything):
                if as_json:
                    print(shown(json.dumps(inspecting.run_json(run), indent=2)))
                elif not quiet:
                    _print_run(run)
                sys.stdout.flush()
            raise
        damaged = _draw(found, drawn, quiet)
        if csv:
            print(shown(found.csv()), end="")
        elif as_json:
            print(shown(json.dumps(found.to_json(), indent=2)))
        elif not quiet:
            print_lines(found.facts(terminal_width()))
            if found.run:
                print()
                _print_run(found.run)
            if tensors:
                print()
                print_table(overview.HEADS, overview.rows(found.checkpoint), right=overview.RIGHT)
            for one in found.parts():
                print_lines(["", *one])
        if damaged is not None:
            sys.stdout.flush()
            raise damaged


def _print_run(run: Sequence[Checked]) -> None:
    from ckpt.commands.check.checking import HEADS

    print_table(HEADS, [one.row() for one in run], right=("step", "size"))


def _draw(found: Inspection, asked: Drawn, quiet: bool) -> CorruptError | None:
    """Write the picture and the page that are asked for; the error is about what they show as damaged."""
    asked.check(found.checkpoint)
    damaged: Sequence[Damage] = ()
    if asked.html is not None:
        page, damaged = found.page(asked.only)
        write(asked.html, page, overwrite=asked.overwrite, quiet=quiet)
    if asked.picture is not None:
        from ckpt.commands.inspect.rows import picture as picture_of
        from ckpt.commands.inspect.svg import draw

        drawn = picture_of(found.checkpoint, only=asked.only)
        damaged = drawn.damaged
        write(asked.picture, draw(drawn, found.checkpoint), overwrite=asked.overwrite, quiet=quiet)
    if not damaged:
        return None
    first, count = damaged[0], len(damaged)
    what = "a tensor do not cover it" if count == 1 else f"{count} tensors do not cover them"
    return CorruptError(
        f"the stored parts of {what} exactly once",
        path=found.checkpoint.path,
        fqn=first.fqn,
        expected="fragments that tile every tensor",
        found=f"{first.role}: {'; '.join(first.faults[:4])}",
        hint=f"{asked.picture or asked.html} shows in red where",
    )


@dataclass(frozen=True)
class Stated:
    """What says how the run trains."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show only this strategy; repeatable. [default: all]"),
    ] = None
    run_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take what is not given from Axolotl's, Accelerate's or FSDP's config."),
    ] = None
    ds_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take stage, offload, sizes and precision from a DeepSpeed config."),
    ] = None


@dataclass(frozen=True)
class Training:
    """How a step is computed."""

    dtype: Annotated[
        TrainDType | None,
        typer.Option(help="Precision that the model computes in. [default: bf16]", rich_help_panel="The run"),
    ] = None
    pure: Annotated[
        bool,
        typer.Option("--pure", help="ddp, fsdp: keep all in --dtype, instead of float32 parameters and autocast."),
    ] = False
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a micro batch of one GPU. [default: 1]")
    ] = None
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence. [default: 4096]")] = None
    fused_cross_entropy: Annotated[
        bool, typer.Option("--fused-cross-entropy", help="The logits are never all made (Cut cross-entropy, Liger).")
    ] = False
    eager_attention: Annotated[
        bool, typer.Option("--eager-attention", help="Attention keeps its scores, without a fused kernel.")
    ] = False
    activation_offload: Annotated[
        bool, typer.Option("--activation-offload", help="Keep inputs of checkpointed layers in the host's memory.")
    ] = False
    recompute_modules: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="megatron: what selective recomputation does not keep.")
    ] = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs, and how the model is spread over them."""

    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs. [default: 1]")] = None
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU; a number alone is GB.")] = "80GB"
    cp: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share a sequence (context parallel, Ulysses). [default: 1]")
    ] = None
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor parallel size.")] = None
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline parallel size.")] = None
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert parallel size.")] = None
    no_sequence_parallel: Annotated[
        bool, typer.Option("--no-sequence-parallel", help="megatron: norms are whole on each tensor parallel rank.")
    ] = False


@dataclass(frozen=True)
class StateOptions:
    """What the optimizer keeps, and where."""

    optimizer: Annotated[Optimizer | None, typer.Option(help="Optimizer, by what it keeps. [default: adam]")] = None
    master_dtype: Annotated[
        StateDType | None, typer.Option(help="zero, megatron: precision of the masters. [default: fp32]")
    ] = None
    state_dtype: Annotated[
        StateDType | None, typer.Option(help="zero, megatron: precision of optimizer states. [default: fp32]")
    ] = None
    offload_optimizer: Annotated[
        Device | None, typer.Option(help="zero: where masters, states and gradients are kept. [default: none]")
    ] = None
    offload_param: Annotated[
        Device | None,
        typer.Option(help="zero3: where parameters are kept; fsdp: cpu, with all states. [default: none]"),
    ] = None


@dataclass(frozen=True)
class Lora:
    """The adapters that are trained."""

    lora_r: Annotated[
        int | None,
        typer.Option("--lora-r", min=0, help="Rank of LoRA adapters to train. 0: train the model. [default: 0]"),
    ] = None
    lora_target_modules: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Modules that get adapters. [default: all linear layers]")
    ] = None
    qlora: Annotated[bool, typer.Option("--qlora", help="Keep the frozen model's linear layers in 4 bits.")] = False


def estimate_(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A config.json or its folder, a Hub id, a checkpoint, or Axolotl's YAML."),
    ],
    stated: Stated,
    training: Training,
    on: Gpus,
    states: StateOptions,
    lora: Lora,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw it: bars by strategy under the GPU's limit.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing picture.")] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits."""
    if picture is not None:
        check_place(picture, ".svg")
    elif overwrite:
        raise UsageError("--overwrite goes with --picture")
    given = opt.by_name({"stated": stated, "training": training, "on": on, "states": states, "lora": lora})
    from ckpt.commands.estimate.estimating import estimate

    found = estimate(model, **given)
    if picture is not None:
        write(picture, found.picture(), overwrite=overwrite, quiet=quiet)
    if not quiet:
        say_notes(found.subject.notes)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    for line in found.lines():
        print(printable(line))


def formats(as_json: opt.JsonOption = False, quiet: opt.QuietOption = False) -> None:
    """List the formats: what can be read and written, and what carries optimizer state."""
    from ckpt.commands.formats import formats as known

    found = known.formats()
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif not quiet:
        print_table(known.HEADS, found.rows())
