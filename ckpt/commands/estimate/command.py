"""`ckpt estimate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ckpt.base.errors import UsageError, printable
from ckpt.commands.estimate.setup import Device, Optimizer, StateDType, TrainDType
from ckpt.options import groups as opt
from ckpt.options.command import BEFOREHAND, Command
from ckpt.options.drawings import check_place, write
from ckpt.options.printing import say_notes


@dataclass(frozen=True)
class Stated:
    """What says how the run trains."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Show only this strategy; repeatable. [default: all]", rich_help_panel="The run"
        ),
    ] = None
    run_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take what is not given from Axolotl's, Accelerate's or FSDP's config.",
            rich_help_panel="The run",
        ),
    ] = None
    ds_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take stage, offload, sizes and precision from a DeepSpeed config.",
            rich_help_panel="The run",
        ),
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
        typer.Option(
            "--pure",
            help="ddp, fsdp: keep all in --dtype, instead of float32 parameters and autocast.",
            rich_help_panel="The run",
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences in a micro batch of one GPU. [default: 1]", rich_help_panel="The run"),
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence. [default: 4096]", rich_help_panel="The run")
    ] = None
    fused_cross_entropy: Annotated[
        bool,
        typer.Option(
            "--fused-cross-entropy",
            help="The logits are never all made (Cut cross-entropy, Liger).",
            rich_help_panel="The run",
        ),
    ] = False
    eager_attention: Annotated[
        bool,
        typer.Option(
            "--eager-attention", help="Attention keeps its scores, without a fused kernel.", rich_help_panel="The run"
        ),
    ] = False
    activation_offload: Annotated[
        bool,
        typer.Option(
            "--activation-offload",
            help="Keep inputs of checkpointed layers in the host's memory.",
            rich_help_panel="The run",
        ),
    ] = False
    recompute_modules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="megatron: what selective recomputation does not keep.", rich_help_panel="The run"
        ),
    ] = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs, and how the model is spread over them."""

    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs. [default: 1]", rich_help_panel="GPUs")] = None
    gpu_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of one GPU; a number alone is GB.", rich_help_panel="GPUs")
    ] = "80GB"
    cp: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs that share a sequence (context parallel, Ulysses). [default: 1]", rich_help_panel="GPUs"
        ),
    ] = None
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor parallel size.", rich_help_panel="GPUs")] = (
        None
    )
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline parallel size.", rich_help_panel="GPUs")] = (
        None
    )
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert parallel size.", rich_help_panel="GPUs")] = (
        None
    )
    no_sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--no-sequence-parallel",
            help="megatron: norms are whole on each tensor parallel rank.",
            rich_help_panel="GPUs",
        ),
    ] = False


@dataclass(frozen=True)
class StateOptions:
    """What the optimizer keeps, and where."""

    optimizer: Annotated[
        Optimizer | None, typer.Option(help="Optimizer, by what it keeps. [default: adam]", rich_help_panel="Optimizer")
    ] = None
    master_dtype: Annotated[
        StateDType | None,
        typer.Option(help="zero, megatron: precision of the masters. [default: fp32]", rich_help_panel="Optimizer"),
    ] = None
    state_dtype: Annotated[
        StateDType | None,
        typer.Option(
            help="zero, megatron: precision of optimizer states. [default: fp32]", rich_help_panel="Optimizer"
        ),
    ] = None
    offload_optimizer: Annotated[
        Device | None,
        typer.Option(
            help="zero: where masters, states and gradients are kept. [default: none]", rich_help_panel="Optimizer"
        ),
    ] = None
    offload_param: Annotated[
        Device | None,
        typer.Option(
            help="zero3: where parameters are kept; fsdp: cpu, with all states. [default: none]",
            rich_help_panel="Optimizer",
        ),
    ] = None


@dataclass(frozen=True)
class Lora:
    """The adapters that are trained."""

    lora_r: Annotated[
        int | None,
        typer.Option(
            "--lora-r",
            min=0,
            help="Rank of LoRA adapters to train. 0: train the model. [default: 0]",
            rich_help_panel="LoRA",
        ),
    ] = None
    lora_target_modules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Modules that get adapters. [default: all linear layers]", rich_help_panel="LoRA"
        ),
    ] = None
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Keep the frozen model's linear layers in 4 bits.", rich_help_panel="LoRA")
    ] = False


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
        Path | None,
        typer.Option(
            metavar="OUT.svg", help="Draw it: bars by strategy under the GPU's limit.", rich_help_panel=opt.SHOWN
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing picture.", rich_help_panel=opt.WRITTEN)
    ] = False,
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


COMMAND = Command(
    name="estimate",
    section=BEFOREHAND,
    function=estimate_,
    examples=(
        ("ckpt estimate outputs-hf --gpus 8 --gpu-memory 80GB", "what fits on 8 GPUs of 80 GB"),
        ("ckpt estimate outputs-hf --strategy zero3 --offload-optimizer cpu", "one strategy alone"),
    ),
    guide="estimate.md",
    place=1,
)
