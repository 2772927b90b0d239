"""`ckpt convert`."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ckpt.base.errors import CkptError, UsageError, printable, shown
from ckpt.base.flags import WRITTEN, Flag, Positional
from ckpt.base.text import did_you_mean
from ckpt.base.version import __version__
from ckpt.base.words import Message
from ckpt.options import command as opt
from ckpt.options.axolotl import run_and_config
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import carry_out, say_result, say_source
from ckpt.plan.groups import Check, Config, Planning, ReadOptions, WriteOptions

_USAGE = "PATH and TO, or FROM, TO and PATH, or PATH alone"
#: May differ between processes.
_OF_EACH = ("as_json", "max_memory", "quiet", "verbose", "workers")


@dataclass(frozen=True)
class Place:
    out: Annotated[Path | None, Positional(metavar="OUT", help="The folder to write, the same as -o.")] = None
    output: Annotated[
        Path | None,
        Flag(("-o", "--output"), help="The folder to write. [default: PATH-TO, next to the run]", section=WRITTEN),
    ] = None

    @property
    def folder(self) -> Path | None:
        if self.out is not None and self.output is not None:
            what = "two output folders given"
            raise UsageError(what, found=Message("{} and {output}", self.out, output=self.output), hint="give only one")
        return self.output if self.out is None else self.out


def convert(
    *,
    source: Annotated[
        str | None,
        Positional(
            metavar="FROM",
            help="The format to read, or auto; see `ckpt formats`. `ckpt convert PATH TO` detects it.",
            complete="sources",
        ),
    ] = None,
    target: Annotated[str | None, Positional(metavar="TO", help="The format to write.", complete="targets")] = None,
    path: Annotated[
        Path | None,
        Positional(metavar="PATH", help="A checkpoint, a run folder, or Axolotl's YAML."),
    ] = None,
    to: Annotated[
        str | None,
        Flag(metavar="TO", help="The format to write, instead of TO.", complete="targets", section=WRITTEN),
    ] = None,
    place: Place,
    requested: Planning,
    check: Check,
    resume: Annotated[bool, Flag(hidden=True)] = False,  # deprecated: conversions always resume
    outcome: opt.Outcome,
    writing: WriteOptions,
    options: Mapping[str, Any],
) -> None:
    """Convert a checkpoint from one format to another."""
    typed = dict(locals())
    quiet = outcome.quiet
    from ckpt import api
    from ckpt.move.files import check_destination, translate_os_errors
    from ckpt.processes.group import check_alike
    from ckpt.processes.launch import joined, launch
    from ckpt.runs.output_place import check_place, default_output

    start = launch()
    if start is not None and not quiet:
        print(f"converting with {start}", file=sys.stderr)
    with joined(start) as group, translate_os_errors():
        if start is not None:
            given = {name: shown(str(value)) for name, value in opt.by_name(typed).items() if name not in _OF_EACH}
            check_alike({"version": __version__, **given}, group)
        source, target, path, place = _with_output_last(source, target, path, place)
        source, target, path, config = _resolve_arguments(source, target, path, to, requested, quiet)
        destination = place.folder or default_output(path, target)
        check_destination(destination, path)  # reading the source may take long
        check_place(destination)
        keywords = {"format": source, **options, **vars(requested), "config": config, "group": group}
        written = carry_out(
            partial(api.convert, path, target, destination, **keywords, **vars(check), **vars(writing)),
            destination,
            outcome,
            lambda conversion: say_source(conversion.source, quiet=quiet, verbose=outcome.verbose),
        )
    if written is not None:
        say_result(written.to_json(), outcome)


def _with_output_last(
    source: str | None, target: str | None, path: Path | None, place: Place
) -> tuple[str | None, str | None, Path | None, Place]:
    """Accept PATH, TO and OUT too."""
    if source is None or path is None or not Path(source).exists() or path.exists():
        return source, target, path, place
    from ckpt.plan import registry
    from ckpt.runs.opening import AUTO

    formats = registry.words()
    if source in (*formats, AUTO) or target not in formats or str(path) in formats or place.out is not None:
        return source, target, path, place
    return AUTO, target, Path(source), replace(place, out=path)


def _resolve_arguments(
    source: str | None, target: str | None, path: Path | None, to: str | None, reading: ReadOptions, quiet: bool
) -> tuple[str, str, Path, Config]:
    """Detect FROM for a single PATH, and ask for TO on a terminal.

    Raise UsageError if there is no terminal, or if the words come in another order.
    """
    if source is not None and target is not None and path is not None and path.exists() and to is None:
        return source, target, *run_and_config(path, reading.config, quiet=quiet)
    from ckpt.plan import registry
    from ckpt.runs.opening import AUTO

    words = [str(word) for word in (source, target, path) if word is not None]
    formats = registry.words()  # imports every format
    if not words:
        raise UsageError("there is nothing to convert", expected=_USAGE, hint=Message("see {help=convert}"))
    if to is not None:
        if len(words) == 3:
            raise UsageError("two target formats given", expected=_USAGE, found=Message("{} and {to}", target, to=to))
        words = [*([AUTO] if len(words) == 1 else words[:1]), to, words[-1]]
    elif len(words) == 2 and words[0] not in (*formats, AUTO) and words[1] in formats:
        words = [AUTO, words[1], words[0]]
    if len(words) == 2:
        raise _one_is_missing(words, formats)
    if len(words) == 3:
        places = [word for word in words if word not in (*formats, AUTO)]
        if words[2] in formats and len(places) == 1:
            found, hint = " ".join(words), f"ckpt convert {_in_order(words, places[0])}"
            raise UsageError("the arguments are in the wrong order", expected="FROM TO PATH", found=found, hint=hint)
        return words[0], words[1], *run_and_config(Path(words[2]), reading.config, quiet=quiet)
    from ckpt import api

    path, config = run_and_config(Path(words[0]), reading.config, quiet=quiet)
    opened = api.open(path, tag=reading.tag, config=config)
    written = [one for one in registry.all_formats() if one.writes]
    print(printable(f"{opened.path} is {opened.format}; choose a target format:"), file=sys.stderr)
    for one in written:
        print(f"  {one.name:<20} {one.title}{'' if one.carries_optimizer else ', weights alone'}", file=sys.stderr)
    if not is_interactive():
        line = f"ckpt convert {shlex.quote(str(path))} {'dcp' if opened.format == 'hf' else 'hf'}"
        raise UsageError("to which format?", path=path, expected=_USAGE, hint=f"for example {line}")
    import typer

    return opened.format, registry.get(typer.prompt("to which format?", err=True)).name, path, config


def _one_is_missing(words: list[str], formats: Sequence[str]) -> UsageError:
    from ckpt.runs.opening import AUTO

    given = [word for word in words if word in formats]
    unknown = next((word for word in words[1:] if word not in (*formats, AUTO) and not Path(word).exists()), None)
    if unknown is not None and not given and Path(words[0]).exists():
        known = did_you_mean(unknown, formats)
        what = f"unknown target format {unknown!r}"
        return UsageError(what, found=" ".join(words), hint=known or _quantizes(words))
    place = next((word for word in words if word not in (*formats, AUTO)), "PATH")
    line = f"ckpt convert {' '.join([AUTO, *(given or ['TO'])][-2:])} {shlex.quote(place)}"
    near = None if given or AUTO in words else did_you_mean(words[1], formats)
    return UsageError("a format or PATH is missing", expected=_USAGE, found=" ".join(words), hint=near or line)


def _quantizes(words: list[str]) -> str:
    line = f"ckpt convert {shlex.quote(words[0])}"
    if re.search(r"ggml|^i?q\d", words[1].lower()):
        return f"`{line} gguf` writes the model for llama.cpp, whose `llama-quantize` makes smaller types"
    if re.search(r"gptq|awq|bnb|nf4|fp8|int\d|fp4|mlx|onnx|exl|quant", words[1].lower()):
        return f"`{line} hf` writes the model; add --quantize, or use another tool to quantize it"
    return "`ckpt formats` lists them"


def _in_order(words: list[str], place: str) -> str:
    """Let the checkpoint's format decide which is FROM."""
    from ckpt import api
    from ckpt.plan import registry
    from ckpt.runs.opening import AUTO

    one, other = (word for word in words if word != place)
    with contextlib.suppress(CkptError):
        found = api.open(place).format
        if one != AUTO and found in [format.name for format in registry.named(other)]:
            one, other = other, one
    return shlex.join([one, other, place])


def is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _start() -> None:
    from ckpt.processes.launch import silence_all_but_one

    silence_all_but_one()


COMMAND = Command(
    name="convert",
    section=CONVERT,
    function=convert,
    examples=(
        ("ckpt convert auto hf outputs --dtype bf16", "the newest checkpoint of a run, for transformers and vLLM"),
        ("ckpt convert zero3 dcp outputs --world-size 4 --dry-run", "what FSDP would need to go on with it"),
    ),
    guide="formats.md",
    urls=("source", "path", "output", "config", "complete_from", "like"),
    writes=True,
    format_options=("reading", "writing"),
    place=1,
    python="ckpt.api:convert",
    start=_start,
)
