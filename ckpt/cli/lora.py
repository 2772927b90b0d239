"""`ckpt merge-lora` and `ckpt push`."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.base.errors import UsageError, printable, shown
from ckpt.cli import options as opt
from ckpt.cli.axolotl import run_of
from ckpt.cli.text import carry_out, say_notes, say_result, say_source

if TYPE_CHECKING:
    from ckpt.commands.push.push import Push


@dataclass(frozen=True)
class MergeOptions:
    """What is merged into what."""

    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The model to merge into: any format, or a Hub id. [default: the one trained on]"
        ),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder with adapter_config.json, or the base's config.json, where it is not with the weights.",
        ),
    ] = None
    tag: opt.TagOption = None
    accept_base: Annotated[
        bool, typer.Option("--accept-base", help="Merge though the base is not the one that the adapter names.")
    ] = False
    expert_layout: opt.ExpertLayoutOption = None
    peft_version: opt.PeftVersionOption = None
    accept_setting: opt.AcceptEntryOption = None
    adapter_slot: opt.AdapterSlotOption = None
    ignore_file: opt.IgnoreFileOption = None


@dataclass(frozen=True)
class Combining:
    """How several adapters become one."""

    weights: Annotated[
        str | None,
        typer.Option("--adapter-weights", metavar="W,...", help="Weights by which several adapters become one."),
    ] = None
    combination: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How adapters are combined: linear, cat, svd, ties, dare_linear, ... as PEFT calls it. [default: svd]",
        ),
    ] = None
    density: Annotated[float | None, typer.Option(help="Fraction of weights kept (ties, dare, magnitude_prune).")] = (
        None
    )
    seed: Annotated[int | None, typer.Option(help="Random seed for dare.")] = None


@dataclass(frozen=True)
class Merged:
    """What the merged model is written as."""

    dtype: Annotated[opt.DType, typer.Option(help="Precision of the base that is merged into.")] = "keep"
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
        typer.Option("-o", "--output", help="The folder to write. [default: ADAPTER-merged, next to the run]"),
    ] = None,
    combining: Combining,
    merged: Merged,
    workers: opt.WorkersOption = 0,
    push: Annotated[bool, typer.Option("--push", help="Push the result to the Hub, and verify what arrived.")] = False,
    at_hub: opt.HubTarget,
    outcome: opt.Outcome,
) -> None:
    """Merge a LoRA adapter into its base model without loading the model."""
    from ckpt.commands.merge_lora.find import open_adapter
    from ckpt.commands.merge_lora.merging import planned
    from ckpt.runs.output_place import default_output
    from ckpt.stores import places

    quiet = outcome.quiet
    given = [run_of(where, quiet=quiet) for where in sources or ["."]]
    wanted, base = [where for where, _ in given], parts.base or given[0][1]
    destination = output or default_output(Path(wanted[0]), "merged")
    names = ("config", "tag", "expert_layout", "peft_version", "adapter_slot")
    asked = {"accept_settings": parts.accept_setting, **{name: getattr(parts, name) for name in names}}
    opened = [open_adapter(where, base=base, **asked) for where in wanted]
    if not push and at_hub != opt.HubTarget():
        raise UsageError("--repo-id, --private, --revision, --create-pr and --commit-message go with --push")
    to = None
    if push:
        # the run's own repository is the adapter's: HF Trainer pushes it there, at the latest at the end
        to = _target(at_hub, merged.names, [opened[0].folder, Path(wanted[0])], "-merged")
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

        report["pushed"] = push_files(places.local(destination), to, None, **_telling(quiet)).to_json()
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


def _target(at: opt.HubTarget, names: opt.Names, folders: list[Path], suffix: str = "") -> Push:
    """Where to push, which is what the run of `folders` records with `suffix` behind it, unless it was said."""
    from ckpt.commands.push.push import Push
    from ckpt.commands.push.recorded import recorded_repo

    repo_id = at.repo_id or recorded_repo(folders, suffix)
    return Push(repo_id, at.private, at.revision, at.create_pr, at.commit_message, names == "own")


def push(
    *,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The folder or URL to push, but hidden files.", readable=False)
    ],
    at_hub: opt.HubTarget,
    names: opt.NamesOption = "hub",
    whole_run: Annotated[
        bool, typer.Option("--whole-run", help="Push a run's optimizer, random states and steps, too.")
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Push a folder to the Hugging Face Hub, and verify the checksums of what arrived. Run it again to go on."""
    from ckpt.commands.push.pushing import push_model
    from ckpt.stores import places

    path = places.local(path)
    to = replace(_target(at_hub, names, [path]), whole_run=whole_run)
    pushed = push_model(path, to, ["ckpt", *sys.argv[1:]], note=say_notes, **_telling(quiet))
    print(json.dumps(pushed.to_json(), indent=2) if as_json else pushed)


def _telling(quiet: bool) -> dict[str, Any]:
    """How a push tells what it does: a line each on stderr, and the library's own bars on a terminal."""

    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr)

    return {"say": say, "progress": not quiet and sys.stderr.isatty()}
