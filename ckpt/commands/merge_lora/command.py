"""`ckpt merge-lora`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.base.errors import UsageError, printable, shown
from ckpt.commands.push.command import push_target, telling
from ckpt.options import groups as opt
from ckpt.options.axolotl import run_of
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import carry_out, say_notes, say_result, say_source

if TYPE_CHECKING:
    from ckpt.commands.push.push import Push


@dataclass(frozen=True)
class MergeOptions:
    """What is merged into what."""

    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model to merge into: any format, or a Hub id. [default: the one trained on]",
            rich_help_panel=opt.READ,
        ),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder with adapter_config.json, or the base's config.json, where it is not with the weights.",
            rich_help_panel=opt.READ,
        ),
    ] = None
    tag: opt.TagOption = None
    accept_base: Annotated[
        bool,
        typer.Option(
            "--accept-base",
            help="Merge though the base is not the one that the adapter names.",
            rich_help_panel=opt.READ,
        ),
    ] = False
    expert_layout: opt.ExpertLayoutOption = None
    peft_version: opt.PeftVersionOption = None
    accept_setting: opt.AcceptEntryOption = None
    ignore_file: opt.IgnoreFileOption = None


@dataclass(frozen=True)
class Combining:
    """How several adapters become one."""

    weights: Annotated[
        str | None,
        typer.Option(
            "--adapter-weights",
            metavar="W,...",
            help="Weights by which several adapters become one.",
            rich_help_panel=opt.HOW,
        ),
    ] = None
    combination: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How adapters are combined: linear, cat, svd, ties, dare_linear, ... as PEFT calls it. [default: svd]",
            rich_help_panel=opt.HOW,
        ),
    ] = None
    density: Annotated[
        float | None,
        typer.Option(help="Fraction of weights kept (ties, dare, magnitude_prune).", rich_help_panel=opt.HOW),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Random seed for dare.", rich_help_panel=opt.HOW)] = None


@dataclass(frozen=True)
class Merged:
    """What the merged model is written as."""

    dtype: Annotated[
        opt.DType, typer.Option(help="Precision of the base that is merged into.", rich_help_panel=opt.WRITTEN)
    ] = "keep"
    dequantize: opt.DequantizeOption = False
    max_shard_size: opt.ShardSizeOption = "5GB"
    names: opt.NamesOption = "hub"
    as_peft: Annotated[
        bool,
        typer.Option(
            "--as-peft", help="Add a change of one of several tied weights to all of them, as PEFT's merge_and_unload."
        ),
    ] = False


def merge_lora(
    *,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADAPTER",
            help="A PEFT folder, a run folder (its newest adapter), Axolotl's YAML, a sharded checkpoint, or a Hub id "
            "in the cache. [default: this folder]",
        ),
    ] = None,
    parts: MergeOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The folder to write. [default: ADAPTER-merged, next to the run]",
            rich_help_panel=opt.WRITTEN,
        ),
    ] = None,
    combining: Combining,
    merged: Merged,
    workers: opt.WorkersOption = 0,
    push: Annotated[
        bool,
        typer.Option("--push", help="Push the result to the Hub, and verify what arrived.", rich_help_panel=opt.HUB),
    ] = False,
    at_hub: opt.HubTarget,
    outcome: opt.Outcome,
    options: Mapping[str, Any],
) -> None:
    """Merge a LoRA adapter into its base model without loading the model."""
    from ckpt.commands.merge_lora.find import open_adapter
    from ckpt.commands.merge_lora.merging import planned
    from ckpt.move.listing import listed_once
    from ckpt.runs.output_place import default_output
    from ckpt.stores import places

    quiet = outcome.quiet
    given = [run_of(where, quiet=quiet) for where in sources or ["."]]
    wanted, base = [where for where, _ in given], parts.base or given[0][1]
    destination = output or default_output(Path(wanted[0]), "merged")
    names = ("config", "tag", "expert_layout", "peft_version")
    asked = {"accept_settings": parts.accept_setting, **{name: getattr(parts, name) for name in names}}
    asked["options"] = options
    with listed_once():
        opened = [open_adapter(where, base=base, **asked) for where in wanted]
        if not push and at_hub != opt.HubTarget():
            raise UsageError("--repo-id, --private, --revision, --create-pr and --commit-message go with --push")
        to = None
        if push:
            # the run's own repository is the adapter's: HF Trainer pushes it there, at the latest at the end
            to = push_target(at_hub, merged.names, [opened[0].folder, Path(wanted[0])], "-merged")
        conversion, found = planned(
            opened,
            base=base,
            config=parts.config,
            accept_base=parts.accept_base,
            adapter_weights=None if combining.weights is None else parse_weights(combining.weights),
            combination=combining.combination,
            density=combining.density,
            seed=combining.seed,
            **vars(merged),
            workers=workers,
            ignored=parts.ignore_file or (),
        )
    if to is not None and not outcome.dry_run:
        from ckpt.commands.push.push import check_room

        check_room(set(conversion.files), to)
    for one in opened if quiet else found:
        say_notes(one.checkpoint.passed_over if quiet else one.notes, verbose=outcome.verbose or quiet)
    path = Path(conversion.source.path)
    others = [one.source for one in opened if not path.is_relative_to(one.path)]  # the base is in a run's checkpoint
    what = f"merging {', '.join(others)} into " if others else "merging into "
    say_source(conversion.source, what, quiet=quiet, verbose=outcome.verbose)
    facts = {"base": shown(base or found[0].config.base or conversion.source.path)}
    facts["adapters"] = shown(", ".join(one.source for one in opened))
    report = carry_out(
        conversion,
        destination,
        outcome,
        describe=functools.partial(_merge_card, to, facts, found[0].config.base),
    )
    if report is None:
        return
    effects = conversion.noted.effects
    report["targets"] = effects.to_json()
    if quiet:  # what is wrong with the result is said even then
        say_notes(list(effects.warnings()))
    if to is not None:
        from ckpt.commands.push.pushing import push_files

        report["pushed"] = push_files(places.local(destination), to, None, **telling(quiet)).to_json()
    say_result(report, outcome)
    if to is not None and not outcome.as_json:
        print(printable(report["pushed"]["url"]))


def parse_weights(text: str) -> list[float]:
    """`0.7,0.3` as numbers; UsageError where they are none."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(map(isfinite, weights)):
        raise UsageError("--adapter-weights takes numbers with commas between them", found=text)
    return weights


def _merge_card(to: Push | None, facts: dict[str, str], base: str | None, folder: Path) -> dict[str, bytes]:
    """The model card of what was merged into `folder`, if it is going to be pushed."""
    from ckpt import api
    from ckpt.commands.push.card import CARD, model_card
    from ckpt.runs.opening import open_checkpoint

    if to is None:
        return {}
    digests = api.digests(open_checkpoint(folder, "hf", unfinished=True)).whole
    card = model_card(to.repo_id.rpartition("/")[2], facts, digests, ["ckpt", *sys.argv[1:]], base)
    return {CARD: card.encode()}


COMMAND = Command(
    name="merge-lora",
    section=CONVERT,
    function=merge_lora,
    examples=(
        ("ckpt merge-lora adapter --base model", "a model with the adapter in it, in adapter-merged"),
        ("ckpt merge-lora adapter --base model -o merged --dtype bf16 --dry-run", "what it would write"),
    ),
    guide="merge-lora.md",
    urls=("sources", "base", "config", "output"),
    texts=("commit_message",),
    writes=True,
    format_options=("reading",),
    place=4,
)
