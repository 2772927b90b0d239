"""`ckpt verify`, `ckpt check` and `ckpt hash`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt.base.errors import UsageError, printable, shown
from ckpt.base.progress import progress
from ckpt.cli import complete
from ckpt.cli import options as opt
from ckpt.cli.text import say_notes, say_source


@dataclass(frozen=True)
class Sides:
    """What is read on the two sides."""

    from_a: Annotated[str, typer.Option(metavar="FORMAT", help="The format of A.", autocompletion=complete.sources)] = (
        "auto"
    )
    from_b: Annotated[str, typer.Option(metavar="FORMAT", help="The format of B.", autocompletion=complete.sources)] = (
        "auto"
    )
    tag_a: Annotated[str | None, typer.Option(metavar="TAG", help="The step folder of A.")] = None
    tag_b: Annotated[str | None, typer.Option(metavar="TAG", help="The step folder of B.")] = None
    config: opt.ConfigOption = None


def verify(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint or run folder.", readable=False)],
    b: Annotated[Path | None, typer.Argument(metavar="B", help="Another, of any format.", readable=False)] = None,
    sides: Sides,
    only: Annotated[opt.Only, typer.Option(help="Compare only these tensors.")] = "all",
    cast: Annotated[
        bool, typer.Option("--cast", help="Where dtypes differ, round the wider to the narrower, then compare.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Compare the training states instead of the tensors: schedule, scaler, random states, data position.",
        ),
    ] = False,
    loads: Annotated[
        bool, typer.Option("--loads", help="Have transformers load A without data, and report what is wrong with it.")
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Compare two checkpoints bit by bit, or a folder with its manifest. Exit code 0: equal, 1: different."""
    from ckpt import api
    from ckpt.stores.standins import is_standin

    if run and (b is None or loads or cast or only != "all"):
        raise UsageError("--run takes two runs or checkpoints, and neither --only, --cast nor --loads")
    if loads:
        if b is not None:
            raise UsageError("--loads takes one folder", found=f"{a} and {b}")
        if is_standin(str(a)):
            raise UsageError("transformers itself loads local folders only", path=a, hint="convert it to one first")
        _verify_loads(a, as_json, quiet)
        return
    if b is None:
        asked = {"--only": only != "all", "--cast": cast, "--config": sides.config, "--tag-a": sides.tag_a}
        asked |= {"--from-a": sides.from_a != "auto", "--from-b": sides.from_b != "auto", "--tag-b": sides.tag_b}
        if of_two := " ".join(name for name, given in asked.items() if given):
            what = "a folder is held against its manifest as a whole: these options are for two checkpoints"
            raise UsageError(what, path=a, found=of_two, hint="give a second checkpoint, or leave them out")
        _verify_manifest(a, as_json, quiet)
        return
    one = api.open(a, sides.from_a, tag=sides.tag_a, config=sides.config)
    other = api.open(b, sides.from_b, tag=sides.tag_b, config=sides.config)
    say_source(one, "A: ", quiet=quiet)
    say_source(other, "B: ", quiet=quiet)
    if run:
        states = api.verify_runs(one, other)
        _conclude(states.to_json, lambda: states.lines(verbose), 0 if states.equal else opt.DIFFERENT, as_json, quiet)
        return
    total = sum(tensor.nbytes for tensor in one.tensors.values())
    with progress(total, "compare", quiet=quiet) as meter:
        report = api.verify(one, other, only=only, cast=cast, progress=meter)
    _conclude(report.to_json, lambda: report.lines(verbose), report.exit_code, as_json, quiet)


def _verify_loads(path: Path, as_json: bool, quiet: bool) -> None:
    from ckpt import api

    loading = api.check_loads(path)
    _conclude(loading.to_json, loading.lines, 0 if loading.good else opt.DIFFERENT, as_json, quiet)


def _verify_manifest(path: Path, as_json: bool, quiet: bool) -> None:
    from ckpt.stores.places import local
    from ckpt.verify import manifest

    path = local(path)
    with progress(manifest.expected_bytes(path), "hash", quiet=quiet) as meter:
        checked = manifest.check(path, meter)
    _conclude(checked.to_json, checked.lines, 0 if checked.good else opt.DIFFERENT, as_json, quiet)


def _conclude(
    to_json: Callable[[], Any], lines: Callable[[], Iterable[str]], code: int, as_json: bool, quiet: bool
) -> None:
    """Print a report, and exit with its `code`."""
    if as_json:
        print(shown(json.dumps(to_json(), indent=2)))
    elif not quiet:
        print("\n".join(lines()))
    if code:
        raise typer.Exit(code)


def check(
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    every_byte: Annotated[
        bool, typer.Option("--bytes", help="Read every byte, and compare the checksums that files have.")
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Say whether a checkpoint is whole, or each of a run's. Exit code 0: whole, 4: damaged or incomplete."""
    from ckpt.check import checking

    total = checking.expected_bytes(path, tag) if every_byte else 0
    with progress(total, "check", quiet=quiet or not every_byte) as meter:
        report = checking.check(path, format, tag=tag, every_byte=every_byte, progress=meter)
    _conclude(report.to_json, report.lines, report.exit_code, as_json, quiet)


def hash_(
    path: opt.PathArgument,
    format: opt.FormatOption = "auto",
    tag: opt.TagOption = None,
    config: opt.ConfigOption = None,
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
) -> None:
    """Print digests of what a checkpoint holds: the same whatever its format, sharding and order of files."""
    from ckpt import api
    from ckpt.plan.dtypes import CASTABLE
    from ckpt.verify.beside import not_hashed
    from ckpt.verify.digest import ALGORITHM

    checkpoint = api.open(path, format, tag=tag, config=config)
    say_source(checkpoint, quiet=quiet)
    with progress(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), "hash", quiet=quiet) as meter:
        found = api.digests(checkpoint, dtype=CASTABLE.get(dtype), workers=workers, progress=meter)
    left_out = not_hashed(checkpoint)
    if as_json:
        content = {"algorithm": ALGORITHM, "digests": found.whole, "tensors": [t.to_json() for t in found.tensors]}
        print(shown(json.dumps(content | {"not_hashed": left_out}, indent=2)))
        return
    say_notes(() if quiet else left_out)
    for kind, digest in found.whole.items():
        print(f"{ALGORITHM}:{digest}  {kind}  ({len(found.of_kind(kind))} tensors)")
    if tensors:
        for tensor in found.tensors:
            print(printable(f"{tensor.digest}  {tensor.role}  {tensor.fqn}  {tensor.dtype} {list(tensor.shape)}"))
