"""`ckpt merge-lora`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ckpt.base.errors import UsageError, printable, shown
from ckpt.base.flags import HUB, WRITTEN, Flag, Positional
from ckpt.base.words import Message
from ckpt.commands.merge_lora.options import Combining, Merged, MergeSource, Threads
from ckpt.commands.push.command import push_target, telling
from ckpt.options import command as opt
from ckpt.options.axolotl import run_of
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import carry_out, say_notes, say_result, say_source
from ckpt.plan.groups import HubTarget, WriteOptions

if TYPE_CHECKING:
    from ckpt.commands.merge_lora.effect import Merge
    from ckpt.commands.push.push import Push


def merge_lora(
    *,
    sources: Annotated[
        list[str] | None,
        Positional(
            metavar="ADAPTER",
            help="A PEFT folder, a run folder (its newest adapter), Axolotl's YAML, a sharded checkpoint, or a Hub id "
            "in the cache. [default: this folder]",
        ),
    ] = None,
    source: MergeSource,
    output: Annotated[
        Path | None,
        Flag(
            ("-o", "--output"),
            help="The folder to write. [default: ADAPTER-merged, next to the run]",
            section=WRITTEN,
        ),
    ] = None,
    combining: Combining,
    merged: Merged,
    threads: Threads,
    push: Annotated[bool, Flag(help="Push the result to the Hub, and verify what arrived.", section=HUB)] = False,
    at_hub: HubTarget,
    outcome: opt.Outcome,
    writing: WriteOptions,
    options: Mapping[str, Any],
) -> None:
    """Merge a LoRA adapter into its base model without loading the model."""
    from ckpt.commands.merge_lora import merging
    from ckpt.commands.push.push import check_room
    from ckpt.runs.output_place import default_output
    from ckpt.stores import placeholder_files

    quiet = outcome.quiet
    if not push and at_hub != HubTarget():
        raise UsageError(
            Message("{repo_id}, {private=True}, {revision}, {create_pr=True} and {commit_message} go with --push")
        )
    given = [run_of(where, quiet=quiet) for where in sources or ["."]]
    wanted = [where for where, _ in given]
    source = replace(source, base=source.base or given[0][1])
    destination = output or default_output(Path(wanted[0]), "merged")
    to: Push | None = None
    trained_on: str | None = None
    facts: dict[str, str] = {}

    def show(merge: Merge) -> None:
        nonlocal to, trained_on
        trained_on = merge.combined[0].config.base
        facts["base"] = shown(str(source.base or trained_on or merge.source.path))
        facts["adapters"] = shown(", ".join(one.source for one in merge.opened))
        if push:
            # HF Trainer pushes the adapter to the run's own repository
            to = push_target(at_hub, merged.names, [merge.opened[0].folder, Path(wanted[0])], "-merged")
            if not outcome.dry_run:
                check_room(set(merge.files), to)
        for one in merge.opened if quiet else merge.combined:
            say_notes(one.checkpoint.passed_over if quiet else one.notes, verbose=outcome.verbose or quiet)
        path = Path(merge.source.path)
        others = [one.source for one in merge.opened if not path.is_relative_to(one.path)]  # a run contains its base
        what = f"merging {', '.join(others)} into " if others else "merging into "
        say_source(merge.source, what, quiet=quiet, verbose=outcome.verbose)

    def card(folder: Path) -> dict[str, bytes]:
        return {} if to is None else _merge_card(to, facts, trained_on, folder)

    requested: Any = {**vars(source), **vars(combining), **vars(merged), **vars(threads), **vars(writing), **options}
    written = carry_out(
        partial(merging.merge_lora, wanted, destination, describe=card, **requested),
        destination,
        outcome,
        show,
    )
    if written is None:
        return
    if quiet:  # print the result's problems even with --quiet
        say_notes(list(written.effects.warnings()))
    report = written.to_json()
    if to is not None:
        from ckpt.commands.push.pushing import push_files

        report["pushed"] = push_files(placeholder_files.local(destination), to, None, **telling(quiet)).to_json()
    say_result(report, outcome)
    if to is not None and not outcome.as_json:
        print(printable(report["pushed"]["url"]))


def _merge_card(to: Push, facts: dict[str, str], base: str | None, folder: Path) -> dict[str, bytes]:
    from ckpt import api
    from ckpt.commands.push.card import CARD, model_card
    from ckpt.runs.opening import open_checkpoint

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
    python="ckpt.commands.merge_lora.merging:merge_lora",
)
