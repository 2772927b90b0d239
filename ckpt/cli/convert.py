"""`ckpt convert`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt.base.errors import UsageError, printable, shown
from ckpt.base.progress import progress
from ckpt.base.version import __version__
from ckpt.cli import complete
from ckpt.cli import options as opt
from ckpt.cli.axolotl import run_and_config
from ckpt.cli.text import carry_out, say_source

#: Options that may differ in several processes.
_OF_EACH = ("as_json", "max_memory", "quiet", "verbose", "workers")


@dataclass(frozen=True)
class Read:
    """What is read of a run."""

    tag: opt.TagOption = None
    config: opt.ConfigOption = None
    replica: Annotated[
        int | None, typer.Option(metavar="RANK", help="Where ranks hold copies that disagree, take this rank's.")
    ] = None


@dataclass(frozen=True)
class Work:
    """How it is done."""

    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Bound on all buffers together.")] = "512MB"
    workers: opt.WorkersOption = 0
    check: Annotated[
        bool, typer.Option("--check", help="First compare all fp32 masters with the weights stored beside them.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a conversion that was killed stopped, and keep what is done.")
    ] = False


def convert(
    *,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FROM",
            help="The format to read, or auto; see `ckpt formats`. With PATH alone it is guessed, and TO is asked for.",
            autocompletion=complete.sources,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TO", help="The format to write.", autocompletion=complete.targets)
    ] = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="A checkpoint, the run folder it lies in, or Axolotl's YAML.", readable=False
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder to write. [default: PATH-TO, beside PATH]")
    ] = None,
    read: Read,
    precision: opt.Precision,
    optimizer_dtype: Annotated[
        opt.OptimizerDType,
        typer.Option(help="fp32 takes the plain values of optimizer states of 8 or 4 bits (torchao, bitsandbytes)."),
    ] = "keep",
    sharding: opt.Sharding,
    work: Work,
    outcome: opt.Outcome,
    options: Mapping[str, Any],
) -> None:
    """Convert a checkpoint from one format to another."""
    given = {name: shown(str(value)) for name, value in opt.by_name(locals()).items() if name not in _OF_EACH}
    quiet = outcome.quiet
    from ckpt import api
    from ckpt.move.files import check_destination, translate_os_errors
    from ckpt.processes.group import check_alike
    from ckpt.processes.launch import joined, launch

    start = launch()
    if start is not None and not quiet:
        print(f"converting with {start}", file=sys.stderr)
    with joined(start) as group, translate_os_errors():
        check_alike({"version": __version__, **given}, group)
        source, target, path, config = _meant(source, target, path, read, quiet)
        destination = output or default_output(path, target)
        check_destination(destination, path)  # before the source is read, which may take long
        with progress(0, "plan", quiet=quiet):
            conversion = api.plan(
                path,
                target,
                format=source,
                tag=read.tag,
                config=config,
                replica=read.replica,
                **vars(precision),
                **vars(sharding),
                optimizer_dtype=optimizer_dtype,
                max_memory=work.max_memory,
                workers=work.workers,
                **options,
            )
        checkpoint = conversion.source
        say_source(checkpoint, quiet=quiet)
        if output is None and not outcome.overwrite:
            destination = beside_another(path, target, checkpoint.state.step, quiet=quiet)
            destination = group.gather(destination)[0]  # before any process can have written there
        report = carry_out(
            conversion,
            destination,
            outcome,
            check=work.check,
            resume=work.resume,
            group=group,
        )
    if report is not None:
        print(shown(json.dumps(report, indent=2)) if outcome.as_json else printable(str(destination)))


def _meant(
    source: str | None, target: str | None, path: Path | None, read: Read, quiet: bool
) -> tuple[str, str, Path, str | None]:
    """FROM, TO, PATH and the config.  With one word it is PATH: FROM is found out, and TO asked for on a terminal.

    Raises UsageError where there is nobody to be asked, which lists the formats, and with two words.
    """
    if source is not None and target is not None and path is not None:
        return source, target, *run_and_config(path, read.config, quiet=quiet)
    from ckpt.plan import registry

    usage = "FROM, TO and PATH, or PATH alone"
    if source is None:
        raise UsageError("there is nothing to convert", expected=usage, hint="see `ckpt convert --help`")
    if target is not None:
        known = [word for word in (source, target) if word in (*registry.names(), *registry.ALIASES)]
        place = target if source in known else source
        line = f"ckpt convert auto {known[0] if known else 'TO'} {shlex.quote(place)}"
        raise UsageError("a format or PATH is missing", expected=usage, found=f"{source} {target}", hint=line)
    from ckpt import api

    path, config = run_and_config(Path(source), read.config, quiet=quiet)
    found = api.open(path, tag=read.tag, config=config)
    written = [one for one in registry.all_formats() if one.writes]
    print(printable(f"{found.path} is {found.format}, which becomes any of:"), file=sys.stderr)
    for one in written:
        print(f"  {one.name:<20} {one.title}{'' if one.carries_optimizer else ', weights alone'}", file=sys.stderr)
    if not is_interactive():
        line = f"ckpt convert {found.format} hf {shlex.quote(str(path))}"
        raise UsageError("to which format?", path=path, expected="FROM, TO and PATH", hint=f"for example {line}")
    return found.format, registry.get(typer.prompt("to which format?", err=True)).name, path, config


def is_interactive() -> bool:
    """Whether there is somebody to be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def default_output(path: Path, target: str) -> Path:
    """`./outputs` becomes `./outputs-hf`, beside it, and what is at a URL comes here.  UsageError without a name."""
    from ckpt.stores import standins

    if standins.url_of(path) is not None:
        return Path(f"{path.name.partition('@')[0]}-{target}")
    if not path.absolute().name:
        raise UsageError("there is no name to derive an output folder from", path=path, hint="give one with -o")
    if path.is_absolute():
        return path.with_name(f"{path.name}-{target}")
    # a relative sibling, so that what is printed is what the user would type; `.` and `..` need the real name
    named = Path(path.resolve()) if path.name in ("", "..") else path
    return named.with_name(f"{named.name}-{target}")


def beside_another(path: Path, target: str, step: int | None, *, quiet: bool) -> Path:
    """The default output of what was taken at `step`; with the step in its name where a former output has the other."""
    from ckpt.verify.manifest import MANIFEST

    plain = default_output(path, target)
    if step is None or not (plain / MANIFEST).is_file():
        return plain
    numbered = default_output(path, f"step{step}-{target}")
    if not quiet:
        print(printable(f"note: {plain} is there already, so this is written to {numbered}"), file=sys.stderr)
    return numbered
