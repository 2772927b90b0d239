"""`ckpt inspect`, `ckpt estimate` and `ckpt formats`."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt import registry
from ckpt.cli import options as opt
from ckpt.cli.text import say_notes
from ckpt.errors import CorruptError, UsageError, printable
from ckpt.sizes import parse_size

if TYPE_CHECKING:
    from ckpt.plan.checkpoint import Checkpoint


class TrainDType(str, Enum):
    """What a model may compute in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Optimizer(str, Enum):
    """What `estimate --optimizer` takes."""

    adam = "adam"
    adamw = "adamw"
    lion = "lion"
    momentum = "momentum"
    sgd = "sgd"


def inspect(
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    config: opt.ConfigOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw who holds what; exit code 4 if something is damaged.")
    ] = None,
    only: Annotated[opt.Only, typer.Option(help="Draw only these tensors.")] = opt.Only.all,
    as_json: opt.JsonOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing picture.")] = False,
) -> None:
    """Show what a checkpoint holds, and with --picture which ranks hold which parts of it."""
    from ckpt import api
    from ckpt.show import overview as inspection

    if picture is None and (only is not opt.Only.all or overwrite):
        raise UsageError("--only and --overwrite go with --picture")
    checkpoint = api.open(path, format, tag=tag, config=config)
    damaged = _draw(checkpoint, picture, only, overwrite) if picture is not None else None
    if as_json:
        print(json.dumps(inspection.describe(checkpoint, tensors=tensors), indent=2))
    else:
        print("\n".join(inspection.lines(checkpoint, tensors=tensors)))
    if damaged is not None:
        sys.stdout.flush()
        raise damaged


def _draw(checkpoint: Checkpoint, picture: Path, only: opt.Only, overwrite: bool) -> CorruptError | None:
    """Write the picture; the error is about what is damaged."""
    from ckpt import api
    from ckpt.move import files
    from ckpt.show.svg import draw

    api.check_apart(picture, checkpoint)
    if picture.is_file() and not _is_drawing(picture):
        raise UsageError(
            "the file is no picture, and --overwrite would replace it", path=picture, expected="an SVG file"
        )
    drawn = api.picture(checkpoint, only.value)
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
    from ckpt.move.source import open_file, read_up_to

    descriptor = open_file(str(path))
    try:
        head = read_up_to(descriptor, 0, 4096)
        return head.startswith(b"<") and b"<svg" in head
    finally:
        os.close(descriptor)


def estimate_(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json or its folder, a Hub id, or a checkpoint.")
    ],
    strategy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show only this strategy; repeatable. [default: all]"),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU.")] = "80GB",
    dtype: Annotated[TrainDType, typer.Option(help="Precision that the model computes in.")] = TrainDType.bf16,
    pure: Annotated[
        bool,
        typer.Option("--pure", help="ddp, fsdp: keep all in --dtype, instead of float32 parameters and autocast."),
    ] = False,
    optimizer: Annotated[
        Optimizer, typer.Option(help="Optimizer: two states for each parameter, one, or none.")
    ] = Optimizer.adam,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a micro batch of one GPU.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 4096,
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert parallel size.")] = None,
    lora_r: Annotated[
        int, typer.Option("--lora-r", min=0, help="Rank of LoRA adapters to train. 0: train the model.")
    ] = 0,
    lora_target_modules: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Modules that get adapters. [default: all linear layers]")
    ] = None,
    qlora: Annotated[bool, typer.Option("--qlora", help="Keep the frozen model's linear layers in 4 bits.")] = False,
    ds_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="zero: take the sizes of buffers from this DeepSpeed config.")
    ] = None,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits."""
    from ckpt.estimate import table as sizing
    from ckpt.estimate.memory import STRATEGIES, Setup, Zero

    for name in strategy or ():
        if name not in STRATEGIES:
            raise UsageError(f"there is no strategy called {name!r}", expected="one of " + ", ".join(STRATEGIES))
    if (lora_target_modules or qlora) and not lora_r:
        raise UsageError("--lora-target-modules and --qlora go with --lora-r")
    if (tp or pp or ep) and strategy and "megatron" not in strategy:
        raise UsageError("--tp, --pp and --ep are of the strategy megatron", found=", ".join(strategy))
    setup = Setup(
        gpus,
        dtype.value,
        not pure,
        optimizer.value,
        batch_size,
        seq_len,
        lora_r,
        tuple(lora_target_modules.split(",")) if lora_target_modules else None,
        qlora,
        sizing.read_zero(ds_config) if ds_config else Zero(),
    )
    subject = sizing.find(model)
    if not quiet:
        say_notes(subject.notes)
    found = sizing.size(subject, setup, parse_size(gpu_memory), strategy or (), tp=tp, pp=pp, ep=ep)
    if as_json:
        print(json.dumps(sizing.to_json(found), indent=2))
        return
    for line in sizing.lines(found):
        print(printable(line))


def formats(as_json: opt.JsonOption = False) -> None:
    """List the formats: what can be read and written, and what carries optimizer state."""
    rows = [
        {"name": f.name, "reads": f.reads, "writes": f.writes, "optimizer": f.carries_optimizer, "title": f.title}
        for f in registry.all_formats()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'name':<20} {'reads':<6} {'writes':<7} {'optimizer':<10} what it is")
    for row in rows:
        marks = ["yes" if row[key] else "-" for key in ("reads", "writes", "optimizer")]
        print(f"{row['name']:<20} {marks[0]:<6} {marks[1]:<7} {marks[2]:<10} {row['title']}")
