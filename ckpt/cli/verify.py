"""`ckpt verify`, `ckpt diff`, `ckpt check` and `ckpt hash`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.base.errors import UsageError, shown
from ckpt.base.progress import progress
from ckpt.base.returned import Returned
from ckpt.cli import complete
from ckpt.cli import options as opt
from ckpt.cli.drawn import HeatMap
from ckpt.cli.text import print_lines, say_notes, say_source, terminal_width

if TYPE_CHECKING:
    from ckpt.plan.checkpoint import Checkpoint


@dataclass(frozen=True)
class Sides:
    """What is read on the two sides."""

    from_a: Annotated[str, typer.Option(metavar="FORMAT", help="The format of A.", autocompletion=complete.sources)] = (
        "auto"
    )
    from_b: Annotated[str, typer.Option(metavar="FORMAT", help="The format of B.", autocompletion=complete.sources)] = (
        "auto"
    )
    tag_a: Annotated[
        str | None, typer.Option("--tag-a", "--step-a", metavar="TAG", help="The step of A, by name or number.")
    ] = None
    tag_b: Annotated[
        str | None, typer.Option("--tag-b", "--step-b", metavar="TAG", help="The step of B, by name or number.")
    ] = None
    config: opt.ConfigOption = None
    accept_setting: opt.AcceptSettingOption = None


@dataclass(frozen=True)
class Claimed:
    """What made B of A."""

    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="Whether B is A with this LoRA adapter merged into it, and nothing else; of several in their order.",
        ),
    ] = None
    expert_layout: opt.ExpertLayoutOption = None
    peft_version: opt.PeftVersionOption = None
    ignore_file: opt.IgnoreFileOption = None


@dataclass(frozen=True)
class Compared:
    """What is compared, and how."""

    only: Annotated[opt.Only, typer.Option(help="Compare only these tensors.")] = "all"
    cast: Annotated[
        bool, typer.Option("--cast", help="Where dtypes differ, round the wider to the narrower, then compare.")
    ] = False
    exact: Annotated[
        bool, typer.Option("--exact", help="Round nothing: float32 masters differ from weights of 16 bits.")
    ] = False
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Compare the training states instead of the tensors: schedule, scaler, random states, data position.",
        ),
    ] = False
    loads: Annotated[
        bool, typer.Option("--loads", help="Have transformers load A without data, and report what is wrong with it.")
    ] = False


def verify(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint or run folder.", readable=False)],
    b: Annotated[Path | None, typer.Argument(metavar="B", help="Another, of any format.", readable=False)] = None,
    sides: Sides,
    how: Compared,
    claimed: Claimed,
    page: HeatMap,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Compare two checkpoints bit by bit, or a folder with its manifest. Exit code 0: equal, 1: different."""
    from ckpt import api
    from ckpt.move.listing import listed_once

    api.check_goes_together(a, b, **vars(how), **vars(sides))
    if claimed.adapter or claimed.expert_layout or claimed.peft_version or claimed.ignore_file:
        others = {
            "--only": how.only != "all",
            "--cast": how.cast,
            "--exact": how.exact,
            "--run": how.run,
            "--loads": how.loads,
            "--html": bool(page.html),
        }
        _verify_merge(
            a, b, sides, claimed, [name for name, is_given in others.items() if is_given], as_json, quiet, verbose
        )
        return
    if page.html and (b is None or how.run):
        raise UsageError("--html shows how the tensors of two checkpoints differ", hint="give A and B, without --run")
    if b is None:
        _verify_one(a, how.loads, as_json, quiet)
        return
    with listed_once():
        one, other = _opened(a, b, sides, quiet, verbose)
        page.check(one, other)
        with progress(0, "compare", quiet=quiet or how.run) as meter:
            report = (
                api.verify(one, other, run=True)
                if how.run
                else api.verify(
                    one,
                    other,
                    only=how.only,
                    cast=how.cast,
                    exact=how.exact,
                    measured=page.html is not None,
                    progress=meter,
                    expected=meter.expect,
                )
            )
    page.write(report, quiet=quiet)
    _conclude(report, report.lines(verbose), as_json, quiet)


def _verify_merge(
    base: Path,
    merged: Path | None,
    sides: Sides,
    claimed: Claimed,
    others: list[str],
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    from ckpt.commands.merge_lora.proving import verify_merge

    others += [
        f"--{name.replace('_', '-')}" for name in ("from_a", "tag_a") if getattr(sides, name) not in ("auto", None)
    ]
    if merged is None or not claimed.adapter or others:
        raise UsageError(
            "--adapter takes a base and a merged model, and compares all of both",
            expected="ckpt verify BASE MERGED --adapter ADAPTER",
            found=" ".join(others) or None,
        )
    with progress(0, "compare", quiet=quiet) as meter:
        report = verify_merge(
            base,
            merged,
            claimed.adapter,
            expert_layout=claimed.expert_layout,
            peft_version=claimed.peft_version,
            accept_settings=sides.accept_setting,
            ignore_files=claimed.ignore_file or (),
            format=sides.from_b,
            tag=sides.tag_b,
            config=sides.config,
            progress=meter,
            expected=meter.expect,
        )
    _conclude(report, report.lines(verbose), as_json, quiet)


def diff(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="The checkpoint before.", readable=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The one after, of any format.", readable=False)],
    sides: Sides,
    only: Annotated[opt.Only, typer.Option(help="Measure only these tensors.")] = "all",
    rtol: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Allow each element to change by this part of itself.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Allow each element to change by this.")
    ] = None,
    page: HeatMap,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Show what changed from A to B, by layer and tensor. Exit code 0, or 1 where --rtol or --atol is exceeded."""
    from ckpt import api

    one, other = _opened(a, b, sides, quiet, verbose)
    page.check(one, other)
    with progress(0, "measure", quiet=quiet) as meter:
        report = api.diff(one, other, only=only, rtol=rtol, atol=atol, progress=meter, expected=meter.expect)
    page.write(report, quiet=quiet)
    _conclude(report, report.lines(verbose, terminal_width()), as_json, quiet)


def _opened(a: Path, b: Path, sides: Sides, quiet: bool, verbose: bool) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints, after saying what they are."""
    from ckpt import api

    one = api.open(a, sides.from_a, tag=sides.tag_a, config=sides.config, accept_settings=sides.accept_setting)
    other = api.open(b, sides.from_b, tag=sides.tag_b, config=sides.config, accept_settings=sides.accept_setting)
    say_source(one, "A: ", quiet=quiet, verbose=verbose)
    say_source(other, "B: ", quiet=quiet, verbose=verbose)
    return one, other


def _verify_one(path: Path, loads: bool, as_json: bool, quiet: bool) -> None:
    from ckpt import api
    from ckpt.compare import manifest
    from ckpt.stores.places import local

    with progress(0 if loads else manifest.expected_bytes(local(path)), "hash", quiet=quiet or loads) as meter:
        report = api.verify(path, loads=True) if loads else api.verify(path, progress=meter)
    _conclude(report, report.lines(), as_json, quiet)


def _conclude(report: Returned, lines: Iterable[str], as_json: bool, quiet: bool) -> None:
    """Print a report, as its `lines` or as JSON, and exit with its code."""
    if as_json:
        print(shown(json.dumps(report.to_json(), indent=2)))
    elif not quiet:
        print_lines(lines)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def check(
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    every_byte: Annotated[
        bool, typer.Option("--bytes", help="Read every byte, and compare the checksums that files have.")
    ] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Read every value: find NaN, infinities, zeros and untrained tensors.")
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Say whether a checkpoint is whole, or each of a run's. Exit code 0: whole, 4: damaged or incomplete."""
    from ckpt.commands.check import checking

    total = checking.expected_bytes(path, tag) * (every_byte + values) if every_byte or values else 0
    with progress(total, "check", quiet=quiet or not total) as meter:
        report = checking.check(path, format, tag=tag, every_byte=every_byte, values=values, progress=meter)
    _conclude(report, report.lines(), as_json, quiet)


def hash_(
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    config: opt.ConfigOption = None,
    accept_setting: opt.AcceptSettingOption = None,
    dtype: Annotated[
        opt.DType,
        typer.Option(
            help="Precision in which weights count: their own, or as `convert` casts them.",
            rich_help_panel="How it is done",
        ),
    ] = "keep",
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor too.")] = False,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Threads that read. 0: by the processors.")] = 0,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Print digests of what a checkpoint holds: the same whatever its format, sharding and order of files."""
    from ckpt import api

    checkpoint = api.open(path, format, tag=tag, config=config, accept_settings=accept_setting)
    say_source(checkpoint, quiet=quiet)
    with progress(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), "hash", quiet=quiet) as meter:
        found = api.hash(checkpoint, dtype=dtype, workers=workers, progress=meter)
    if not as_json:
        say_notes(() if quiet else found.not_hashed)
    _conclude(found, found.lines(tensors or verbose), as_json, quiet=False)
