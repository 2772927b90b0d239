"""Options of `ckpt estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated

from ckpt.base.flags import Flag, OptionGroup
from ckpt.commands.estimate.setup import Device, Optimizer, StateDType, TrainDType


@dataclass(frozen=True)
class Stated(OptionGroup):
    strategy: Annotated[
        str | Sequence[str] | None,
        Flag(
            type=list[str],
            metavar="NAME",
            help="Show only this strategy; repeatable. [default: all]",
            section="The run",
        ),
    ] = None
    run_config: Annotated[
        str | PathLike[str] | None,
        Flag(
            type=Path,
            metavar="FILE",
            help="Fill missing settings from Axolotl's, Accelerate's or FSDP's config.",
            section="The run",
        ),
    ] = None
    ds_config: Annotated[
        str | PathLike[str] | None,
        Flag(
            type=Path,
            metavar="FILE",
            help="Take stage, offload, sizes and precision from a DeepSpeed config.",
            section="The run",
        ),
    ] = None


@dataclass(frozen=True)
class Training(OptionGroup):
    dtype: Annotated[
        TrainDType | None,
        Flag(help="Dtype for computation. [default: bf16]", section="The run"),
    ] = None
    pure: Annotated[
        bool,
        Flag(
            help="ddp, fsdp: keep all in --dtype, instead of float32 parameters and autocast.",
            section="The run",
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        Flag(min=1, help="Sequences in a micro batch of one GPU. [default: 1]", section="The run"),
    ] = None
    seq_len: Annotated[int | None, Flag(min=1, help="Tokens in a sequence. [default: 4096]", section="The run")] = None
    fused_cross_entropy: Annotated[
        bool,
        Flag(
            help="Never build the full logits (Cut cross-entropy, Liger).",
            section="The run",
        ),
    ] = False
    eager_attention: Annotated[
        bool,
        Flag(help="Use attention without a fused kernel: it keeps its scores.", section="The run"),
    ] = False
    activation_offload: Annotated[
        bool,
        Flag(
            help="Keep inputs of checkpointed layers in the host's memory.",
            section="The run",
        ),
    ] = False
    recompute_modules: Annotated[
        str | Sequence[str] | None,
        Flag(metavar="NAME,...", help="megatron: modules for selective recomputation.", section="The run"),
    ] = None


@dataclass(frozen=True)
class Gpus(OptionGroup):
    gpus: Annotated[int | None, Flag(min=1, help="Number of GPUs. [default: 1]", section="GPUs")] = None
    gpu_memory: Annotated[
        str | int, Flag(metavar="SIZE", help="Memory of one GPU; a number alone is GB.", section="GPUs")
    ] = "80GB"
    cp: Annotated[
        int | None,
        Flag(min=1, help="GPUs that share a sequence (context parallel, Ulysses). [default: 1]", section="GPUs"),
    ] = None
    tp: Annotated[int | None, Flag(min=1, help="megatron: tensor parallel size.", section="GPUs")] = None
    pp: Annotated[int | None, Flag(min=1, help="megatron: pipeline parallel size.", section="GPUs")] = None
    ep: Annotated[int | None, Flag(min=1, help="megatron: expert parallel size.", section="GPUs")] = None
    no_sequence_parallel: Annotated[
        bool,
        Flag(
            help="megatron: keep norms whole on each tensor parallel rank.",
            section="GPUs",
        ),
    ] = False


@dataclass(frozen=True)
class StateOptions(OptionGroup):
    optimizer: Annotated[
        Optimizer | None, Flag(help="Optimizer, for the size of its states. [default: adam]", section="Optimizer")
    ] = None
    master_dtype: Annotated[
        StateDType | None,
        Flag(help="zero, megatron: precision of the masters. [default: fp32]", section="Optimizer"),
    ] = None
    state_dtype: Annotated[
        StateDType | None,
        Flag(help="zero, megatron: precision of optimizer states. [default: fp32]", section="Optimizer"),
    ] = None
    offload_optimizer: Annotated[
        Device | None,
        Flag(help="zero: device for masters, states and gradients. [default: none]", section="Optimizer"),
    ] = None
    offload_param: Annotated[
        Device | None,
        Flag(
            help="zero3: device for parameters; fsdp: cpu, with all states. [default: none]",
            section="Optimizer",
        ),
    ] = None


@dataclass(frozen=True)
class Lora(OptionGroup):
    """Trained adapters."""

    lora_r: Annotated[
        int | None,
        Flag(
            min=0,
            help="Rank of LoRA adapters to train. 0: train the model. [default: 0]",
            section="LoRA",
        ),
    ] = None
    lora_target_modules: Annotated[
        str | Sequence[str] | None,
        Flag(metavar="NAME,...", help="Modules that get adapters. [default: all linear layers]", section="LoRA"),
    ] = None
    qlora: Annotated[bool, Flag(help="Keep the frozen model's linear layers in 4 bits.", section="LoRA")] = False
