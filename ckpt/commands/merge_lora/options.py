"""Options for `ckpt merge-lora`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from typing import Annotated

from ckpt.base.errors import UsageError
from ckpt.base.flags import HOW, READ, WRITTEN, Flag, OptionGroup
from ckpt.base.words import Message
from ckpt.plan.groups import (
    Cast,
    DequantizeOption,
    ExpertLayoutOption,
    IgnoreFilesOption,
    NamesOption,
    PeftVersionOption,
    ShardSizeOption,
    TagOption,
    WorkersOption,
)


def parse_weights(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(map(isfinite, weights)):
        raise UsageError(Message("{adapter_weights} takes numbers with commas between them"), found=text)
    return weights


@dataclass(frozen=True)
class MergeSource(OptionGroup):
    base: Annotated[
        str | PathLike[str] | None,
        Flag(
            metavar="MODEL",
            help="The model to merge into: any format, or a Hub id. [default: the one trained on]",
            section=READ,
        ),
    ] = None
    config: Annotated[
        str | PathLike[str] | None,
        Flag(
            metavar="FOLDER",
            help="The folder with adapter_config.json, or the base's config.json, if it is not next to the weights.",
            section=READ,
        ),
    ] = None
    tag: TagOption = None
    accept_base: Annotated[bool, Flag(help="Merge even if the adapter names another base.", section=READ)] = False
    expert_layout: ExpertLayoutOption = None
    peft_version: PeftVersionOption = None
    accept_settings: Annotated[
        Sequence[str] | None,
        Flag(
            ("--accept-setting",),
            metavar="NAME",
            help="Ignore this unknown entry of adapter_config.json or setting of the run. Repeatable.",
            section=READ,
        ),
    ] = None
    ignore_files: IgnoreFilesOption = None


@dataclass(frozen=True)
class Combining(OptionGroup):
    adapter_weights: Annotated[
        Sequence[float] | None,
        Flag(
            type=str,
            parse=parse_weights,
            metavar="W,...",
            help="Weights for combining several adapters.",
            section=HOW,
        ),
    ] = None
    combination: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            help="How adapters are combined: linear, cat, svd, ties, dare_linear, ... as PEFT calls it. [default: svd]",
            section=HOW,
        ),
    ] = None
    density: Annotated[
        float | None, Flag(help="Fraction of weights kept (ties, dare, magnitude_prune).", section=HOW)
    ] = None
    seed: Annotated[int | None, Flag(help="Random seed for dare.", section=HOW)] = None


@dataclass(frozen=True)
class Merged(OptionGroup):
    dtype: Annotated[Cast, Flag(help="Precision of the base for the merge.", section=WRITTEN)] = "keep"
    dequantize: DequantizeOption = False
    max_shard_size: ShardSizeOption = "5GB"
    names: NamesOption = "hub"
    as_peft: Annotated[
        bool, Flag(help="Add the change in a tied weight to all its copies, like PEFT's merge_and_unload.")
    ] = False


@dataclass(frozen=True)
class Threads(OptionGroup):
    workers: WorkersOption = 0
