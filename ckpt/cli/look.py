"""`ckpt inspect`, `ckpt estimate` and `ckpt formats`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckpt.base.errors import CorruptError, UnsafeError, UsageError, printable, shown
from ckpt.base.sizes import parse_size
from ckpt.base.text import did_you_mean
from ckpt.cli import complete
from ckpt.cli import options as opt
from ckpt.cli.text import print_table, say_notes, terminal_width

if TYPE_CHECKING:
    from ckpt.check.checking import Checked
    from ckpt.plan.checkpoint import Checkpoint
    from ckpt.plan.tensors import Tensor

_MAX_STEPS = 20  # of a run that are looked into, without --all

TrainDType = Literal["bf16", "fp16", "fp32"]  # what a model may compute in
StateDType = Literal["fp32", "bf16", "fp16", "fp8"]  # what an optimizer may keep its masters and states in
Optimizer = Literal["adam", "adamw", "adamw_8bit", "lion", "lion_8bit", "momentum", "momentum_8bit", "sgd"]
Device = Literal["none", "cpu", "nvme"]  # where states are offloaded to


def inspect(
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
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw who holds what; exit code 4 if something is damaged.")
    ] = None,
    only: Annotated[opt.Only, typer.Option(help="Draw only these tensors.")] = "all",
    as_json: opt.JsonOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing picture.")] = False,
) -> None:
    """Show what a checkpoint holds, and with --picture which ranks hold which parts of it."""
    from ckpt import api
    from ckpt.move.listing import listed_once
    from ckpt.run_folder.not_read import not_read
    from ckpt.show import overview as inspection
    from ckpt.show.parts import part_lines, parts_of

    if picture is None and (only != "all" or overwrite):
        raise UsageError("--only and --overwrite go with --picture")
    with listed_once():
        try:
            checkpoint = api.open(path, format, tag=tag, config=config)
        except (CorruptError, UnsafeError):  # it is about the newest; the table is of the others too
            if run := _run(path, tag, everything):
                _print_run(run, {} if as_json else None)
                sys.stdout.flush()
            raise
        damaged = _draw(checkpoint, picture, only, overwrite) if picture is not None else None
        wanted = _matching(checkpoint, tensor or [])
        run = _run(path, tag, everything)
        left = [one.to_json() for one in not_read(checkpoint)]
        if as_json:
            found = inspection.describe(checkpoint, left, tensors=tensors, everything=everything)
            parts = {"parts": [parts_of(one) for one in wanted]} if tensor else {}
            _print_run(run, found | parts)
        else:
            for line in inspection.lines(checkpoint, left, everything=everything, width=terminal_width()):
                print(shown(line))
            if run:
                print()
                _print_run(run)
            if tensors:
                print()
                print_table(inspection.HEADS, inspection.rows(checkpoint), right=inspection.RIGHT)
            for one in wanted:
                print()
                print(shown("\n".join(part_lines(one, checkpoint.path))))
        if damaged is not None:
            sys.stdout.flush()
            raise damaged


def _matching(checkpoint: Checkpoint, patterns: list[str]) -> list[Tensor]:
    """The tensors whose names one of `patterns` fits.  UsageError for a pattern that fits none."""
    names = list(dict.fromkeys(fqn for fqn, _ in checkpoint.tensors))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or "--tensors lists them all"
            raise UsageError(f"there is no tensor called {pattern!r}", path=checkpoint.path, hint=hint)
    return [
        one for (fqn, _), one in checkpoint.tensors.items() if any(fnmatchcase(fqn, pattern) for pattern in patterns)
    ]


def _run(path: Path, tag: str | None, everything: bool) -> list[Checked]:
    """All checkpoints of a run folder, where that holds several."""
    from ckpt.check import checking

    every = checking.checkpoints_of(path) if tag is None and path.is_dir() else []
    return checking.survey(path, every, None if everything else _MAX_STEPS) if len(every) > 1 else []


def _print_run(run: list[Checked], others: dict[str, Any] | None = None) -> None:
    """A run's checkpoints as a table; as JSON, if any, behind what `others` says."""
    if others is None:
        from ckpt.check.checking import HEADS

        print_table(HEADS, [one.row() for one in run], right=("step", "size"))
    else:
        steps = {"checkpoints": [one.to_json() for one in run]} if run else {}
        print(shown(json.dumps(others | steps, indent=2)))


def _draw(checkpoint: Checkpoint, picture: Path, only: opt.Only, overwrite: bool) -> CorruptError | None:
    """Write the picture; the error is about what is damaged."""
    from ckpt import api
    from ckpt.move import files
    from ckpt.show.rows import picture as picture_of
    from ckpt.show.svg import draw

    if picture.suffix.lower() != ".svg":
        raise UsageError("a picture is an SVG file", found=str(picture), hint=f"give {picture.with_suffix('.svg')}")
    try:
        api.check_apart(picture, checkpoint)
    except UsageError as error:
        error.expected, error.hint = "a file that does not lie in the source", "give another place"
        raise
    if picture.is_file() and not _is_drawing(picture):
        raise UsageError(
            "the file is no picture, and --overwrite would replace it", path=picture, expected="an SVG file"
        )
    drawn = picture_of(checkpoint, only=only)
    files.write_file(picture, draw(drawn, checkpoint).encode(), overwrite=overwrite)
    if not drawn.damaged:
        return None
    first, count = drawn.damaged[0], len(drawn.damaged)
    what = "what is stored of a tensor" if count == 1 else f"what is stored of each of {count} tensors"
    return CorruptError(
        f"{what} does not make it up exactly once",
        path=checkpoint.path,
        fqn=first.fqn,
        expected="fragments that tile every tensor",
        found=f"{first.role}: {'; '.join(first.faults[:4])}",
        hint=f"{picture} shows in red where",
    )


def _is_drawing(path: Path) -> bool:
    """Whether a file begins as an SVG does."""
    from ckpt.move.source import read_file

    head = read_file(path, 4096)
    return head.startswith(b"<") and b"<svg" in head


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

    def setup(self) -> dict[str, Any]:
        """What of `Setup` this tells; None for what is not given."""
        return {
            "dtype": self.dtype,
            "mixed": False if self.pure else None,
            "batch": self.batch_size,
            "length": self.seq_len,
            "fused_loss": self.fused_cross_entropy or None,
            "eager_attention": self.eager_attention or None,
            "activation_offload": self.activation_offload or None,
            "recompute": _listed(self.recompute_modules),
        }


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

    def setup(self) -> dict[str, Any]:
        """What of `Setup` this tells; None for what is not given."""
        is_whole = False if self.no_sequence_parallel else None
        return {"gpus": self.gpus, "context_parallel": self.cp, "sequence_parallel": is_whole}

    def axes(self) -> dict[str, int]:
        """The sizes of Megatron's axes that are given."""
        return {name: size for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if size}


@dataclass(frozen=True)
class OptimizerStates:
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

    def setup(self) -> dict[str, Any]:
        """What of `Setup` this tells; None for what is not given."""
        return {
            "optimizer": self.optimizer,
            "master_dtype": self.master_dtype,
            "state_dtype": self.state_dtype,
            "offload_optimizer": self.offload_optimizer and self.offload_optimizer.replace("none", ""),
            "offload_params": self.offload_param and self.offload_param.replace("none", ""),
        }


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

    def setup(self) -> dict[str, Any]:
        """What of `Setup` this tells; None for what is not given."""
        targets = _listed(self.lora_target_modules)
        return {"lora_rank": self.lora_r, "lora_targets": targets, "quantized": self.qlora or None}


def estimate_(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A config.json or its folder, a Hub id, a checkpoint, or Axolotl's YAML."),
    ],
    stated: Stated,
    training: Training,
    on: Gpus,
    states: OptimizerStates,
    lora: Lora,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits."""
    from ckpt.estimate import run_config as configs
    from ckpt.estimate import table as sizing
    from ckpt.estimate import text
    from ckpt.estimate.setup import RECOMPUTED, STRATEGIES, Setup

    for name in stated.strategy or ():
        if name not in STRATEGIES:
            raise UsageError(f"there is no strategy called {name!r}", expected="one of " + ", ".join(STRATEGIES))
    for name in training.setup()["recompute"] or ():
        if name not in RECOMPUTED:
            raise UsageError(f"no module called {name!r} is recomputed", expected=", ".join(RECOMPUTED))
    run_config = stated.run_config
    if model.endswith((".yaml", ".yml")):
        if run_config is not None:
            raise UsageError("a run has one config", found=f"{model} and --run-config {run_config}")
        run_config = Path(model)
        model = configs.model_of(configs.load(run_config), run_config)
    subject = sizing.find(model)
    run = configs.RunConfig()
    for path in (run_config, stated.ds_config):
        if path is not None:
            run = run.under(configs.understand(configs.load(path), path, subject.model.hidden))
    given = {**on.setup(), **training.setup(), **states.setup(), **lora.setup()}
    setup = Setup(**{**run.setup, **{name: value for name, value in given.items() if value is not None}})
    chosen = stated.strategy or ([run.strategy] if run.strategy else [])
    if (setup.lora_targets or setup.quantized) and not setup.lora_rank:
        raise UsageError("--lora-target-modules and --qlora go with --lora-r")
    if on.axes() and chosen and "megatron" not in chosen:
        raise UsageError("--tp, --pp and --ep are of the strategy megatron", found=", ".join(chosen))
    if not quiet:
        say_notes(subject.notes)
    found = sizing.size(subject, setup, _gpu_memory(on.gpu_memory), chosen, **{**run.axes, **on.axes()})
    if as_json:
        print(json.dumps(text.to_json(found), indent=2))
        return
    for line in text.lines(found):
        print(printable(line))


def _listed(names: str | None) -> tuple[str, ...] | None:
    """Names between commas; None where none are given."""
    return tuple(names.split(",")) if names else None


def _gpu_memory(size: str) -> int:
    """Bytes; GPUs are sold by the GB, so a number alone is of these."""
    if not size.strip().replace(".", "", 1).isdecimal():
        return parse_size(size)
    if float(size) >= 1 << 16:
        raise UsageError("a GPU has no such memory", expected="GB, or a size as 24GB or 24564MiB", found=size)
    return parse_size(f"{size.strip()}GB")


def formats(as_json: opt.JsonOption = False) -> None:
    """List the formats: what can be read and written, and what carries optimizer state."""
    from ckpt.plan import registry

    every = registry.all_formats()
    if as_json:
        keys = {"name": "name", "aliases": "aliases", "reads": "reads", "writes": "writes"}
        keys |= {"optimizer": "carries_optimizer", "title": "title"}
        print(json.dumps([{key: getattr(one, name) for key, name in keys.items()} for one in every], indent=2))
        return
    table = []
    for one in every:
        marks = ["yes" if able else "-" for able in (one.reads, one.writes, one.carries_optimizer)]
        also = f"; also {', '.join(one.aliases)}" if one.aliases else ""
        table.append((one.name, *marks, one.title + also))
    print_table(("name", "reads", "writes", "optimizer", "what it is"), table)
