"""Command line from declarations."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt import commands
from ckpt.base import streams
from ckpt.base.errors import CkptError, SeveralRunsError, UsageError, shown
from ckpt.base.flags import READ, SECTIONS, Flag, Positional, flag_of, type_of
from ckpt.base.streams import code_of_reader, coloured, say_ended
from ckpt.base.text import scheme_of
from ckpt.base.words import Keyword, Message, keywords_in
from ckpt.cli import values
from ckpt.cli.usage import say_error, saying_usage_errors
from ckpt.cli.values import quicken
from ckpt.options import completion
from ckpt.options.command import Command, split_groups
from ckpt.plan.options import Option, options_of

Function = TypeVar("Function", bound=Callable[..., Any])
#: At the end of `ckpt --help`.
EXAMPLES = (
    ("ckpt convert auto hf outputs", "the newest checkpoint of a run, for transformers and vLLM"),
    ("ckpt inspect outputs --picture who-holds-what.svg", "what it holds, and which rank has which part"),
)


_URL = re.compile(r"(?:-o|--(?:output|config|base|adapter|complete-from|like)=)?[a-z][a-z0-9+.-]+://(.*)", re.DOTALL)
_TRUE = ("1", "t", "true", "y", "yes", "on")


def _with_urls(command: Command, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace each URL by a local stand-in. Raise UsageError if the argument takes no URL."""

    def placed(value: Any, is_taken: bool) -> Any:
        if isinstance(value, list):
            return [placed(one, is_taken) for one in value]
        if not isinstance(value, (str, Path)) or (scheme := scheme_of(value)) is None:
            return value
        if not is_taken:
            said, url = f"`ckpt {command.name}` takes no URL here", str(value).partition(":")[2]
            found = f"{scheme}://{url.lstrip('/')}"
            raise UsageError(said, found=found, hint="give a local path, or copy it there first")
        from ckpt.stores import placeholder_files

        return type(value)(placeholder_files.place(str(value)))

    return {
        name: value if name in command.texts else placed(value, name in command.urls)
        for name, value in arguments.items()
    }


def guarded(function: Function, command: Command) -> Function:
    """Turn ckpt's errors into a message on stderr and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from ckpt.move.files import translate_os_errors

        try:
            with translate_os_errors():
                result = function(*args, **_with_urls(command, kwargs))
                sys.stdout.flush()
                return result
        except CkptError as error:
            if isinstance(error.__cause__, BrokenPipeError) and (code := code_of_reader()) is not None:
                raise typer.Exit(code) from None
            with contextlib.suppress(CkptError, typer.Exit):  # the options themselves may be wrong
                error.hint = error.hint and _for_command(error.hint, command.name)
            say_error(error, *_commands(error), *getattr(error, "__notes__", ()))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(say_ended(interrupt)) from None

    return run  # type: ignore[return-value]


def _for_command(hint: str, name: str) -> str:
    """Use the option names of the command `name`. Mark options that only `ckpt convert` has."""
    known = _options_of(name)
    if not known or not isinstance(hint, Message):
        return hint
    hint = Message.of(_of_side(part, known) if isinstance(part, Keyword) else part for part in hint.parts)
    others = dict.fromkeys(one.flag for one in keywords_in(hint) if one.flag not in known)
    elsewhere = [option for option in others if option in _options_of("convert")]
    if not elsewhere or "convert" in hint:
        return hint
    return f"{hint} (`ckpt convert` has {' and '.join(elsewhere)}, `ckpt {name}` has not)"


def _of_side(option: Keyword, known: Collection[str]) -> Keyword:
    """Return the option for A if the command compares A and B."""
    of_a = replace(option, name=f"{option.name}_a")
    return of_a if option.flag not in known and of_a.flag in known else option


def _options_of(name: str) -> set[str]:
    if name not in commands.places():
        return set()
    params = _built(commands.command(name)).params
    return {option for param in params for option in (*param.opts, *param.secondary_opts)}


def _commands(error: CkptError) -> list[str]:
    if not isinstance(error, SeveralRunsError):
        return []
    path, normal = shown(str(error.path)), os.path.abspath  # changes URLs, but both in the same way
    requested = [word for word in sys.argv[1:] if not word.startswith("-") and normal(word) == normal(path)]
    words = sys.argv[1:] if requested else [*sys.argv[1:], path]
    if "--tag" in words:  # it chose the step around these runs
        del words[(at := words.index("--tag")) : at + 2]
    place = max(i for i, word in enumerate(words) if word == (requested[-1] if requested else path))
    return [f"  {shlex.join(['ckpt', *words[:place], shown(run), *words[place + 1 :]])}" for run in error.runs]


_OF_FORMATS = "Options of "
_OTHERS = "Options"
_TYPES = {"<int range>": "N", "<int>": "N", "<float>": "X", "<path>": "PATH", "<str>": "TEXT", "<list[str]>": "TEXT"}


class _Help:
    """Help as plain text in sections. A format's options have a `rich_help_panel`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with saying_usage_errors(f"{parent.command_path} {info_name}" if parent else "ckpt"):
            return super().make_context(info_name, args, parent, **extra)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        quicken(params)
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_sections(self, formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
        for title, records in sections.items():
            with formatter.section(_bold(title)):
                formatter.write_dl(records)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *SECTIONS)}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                name, _, taken = record[0].partition(" <")
                name += "" if is_argument or not taken else f" {_TYPES.get(f'<{taken}', f'<{taken}')}"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or _OTHERS
                sections.setdefault(title, []).append((name, record[1]))
        last = [title for title in sections if title == _OTHERS or title.startswith(_OF_FORMATS)]
        sections |= {title: sections.pop(title) for title in sorted(last, key=lambda title: title != _OTHERS)}
        if self.name != "convert":  # type: ignore[attr-defined]
            names = {
                title.removeprefix(_OF_FORMATS): _few([name.partition(" ")[0] for name, _ in sections.pop(title)])
                for title in [*sections]
                if title.startswith(_OF_FORMATS)
            }
            sections["Options of formats, explained by `ckpt convert --help`"] = [*names.items()]
        self.format_sections(formatter, {title: records for title, records in sections.items() if records})

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        name = self.name  # type: ignore[attr-defined]
        with formatter.section(_bold("Examples")):
            for command, meaning in commands.command(name).examples if name in commands.places() else EXAMPLES:
                formatter.write(f"{'':{formatter.current_indent}}{command}\n")
                with formatter.indentation():
                    formatter.write_text(meaning)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _bold(title: str) -> str:
    return typer.style(title, bold=True) if coloured(sys.stdout) else title


class TypedCommand(_Help, TyperCommand):
    """A command with help in sections."""


class CommandGroup(_Help, TyperGroup):
    """Only the running command gets formats' options: help and completion stay fast."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands: dict[str, Any] = dict.fromkeys(commands.places())  # names, for suggestions

    def list_commands(self, ctx: Any) -> list[str]:
        return [command.name for command in commands.all_commands()]

    def get_command(self, ctx: Any, name: str) -> Any:
        return _without_formats(commands.command(name)) if name in self.commands else None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {}
        for command in commands.all_commands():
            about = inspect.getdoc(command.function) or ""
            sections.setdefault(command.section, []).append((command.name, about.split("\n\n")[0]))
        self.format_sections(formatter, sections)

    def invoke(self, ctx: Any) -> Any:
        with saying_usage_errors(ctx.command_path):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # `ckpt help convert`
            args = [*args[1:2], "--help"]
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if "" in args[1:]:  # `Path("")` would be the current folder
            before = args[args.index("", 1) - 1]
            where = before if before.startswith("-") else None
            raise UsageError("an argument is empty", found=where, hint="check the shell variable: it may be unset")
        resolved: Any = super().resolve_command(ctx, args)
        name, command, rest = resolved
        declared = commands.command(name)
        streams.work_is_files = declared.writes
        for before, arg in pairwise(args):
            url = _URL.fullmatch(arg) if before.strip("-").replace("-", "_") not in declared.texts else None
            if url and not {"", "."}.isdisjoint(url[1].removesuffix("/").split("/")[1:]):
                # `Path` would normalise it to another key
                raise UsageError("the URL's path contains an empty part or a dot", found=shown(arg))
        if declared.format_options:
            command = _built(declared)
        _check_spelled_once(command.params, rest)
        found = values.of_command(name, command.params)
        ctx.default_map = {name: found}
        streams.json_by_default = str(found.get("as_json")).lower() in _TRUE
        return name, command, rest


def _check_spelled_once(params: Sequence[Any], args: Sequence[str]) -> None:
    """Raise UsageError for one option under two names, like --tag and --step: click would use the last."""
    given = [word.partition("=")[0].replace("_", "-") for word in takewhile(lambda word: word != "--", args)]
    for param in params:
        names = [name for name in param.opts if name.startswith("--") and name in given]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are one option", hint=f"leave {names[-1]} out")


@functools.cache
def _without_formats(command: Command) -> Any:
    return _built(replace(command, format_options=()))


def _built(command: Command) -> Any:
    from ckpt.plan import registry

    owners = registry.declared_options() if command.format_options else None
    run = guarded(with_options(command.function, owners, command.format_options), command)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(command.name, cls=TypedCommand)(run)
    return typer.main.get_command(alone)


def with_options(
    function: Callable[..., Any],
    owners: Mapping[type, Sequence[str]] | None = None,
    kinds: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return `function` with an option for each group field and each format option.

    `owners` maps each dataclass to its formats. Format options in `kinds` arrive in the argument `options`, if the user
    sets them. Raise UsageError if two options have the same name.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters, groups = split_groups(function)
    takes_others = "options" in parameters
    known = {name: _in_typer(one) for name, one in parameters.items() if name != "options"}
    declared: dict[str, Option] = {}
    for owner, formats in (owners or {}).items():
        for one in options_of(owner):
            if ("reading" if one.is_for_reading else "writing") not in kinds:
                continue
            if one.name in known:
                raise UsageError(
                    f"`ckpt convert` has two options named {one.flag}",
                    found=f"one belongs to {', '.join(formats)}",
                    hint="uninstall one of the two packages, or rename its option",
                )
            declared[one.name] = one
            section = READ if one.is_for_reading else f"{_OF_FORMATS}{', '.join(formats)}"
            known[one.name] = _in_typer(_parameter(one, section))

    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in declared}
        arguments = {name: _parsed(parameters[name], value) for name, value in arguments.items()}
        made: dict[str, Any] = {
            name: group(**{member: arguments.pop(member) for member in members})
            for name, (group, members) in groups.items()
        }
        if takes_others:
            made["options"] = {name: value for name, value in given.items() if value != declared[name].default}
        return function(**arguments, **made)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in known.values()]
    vars(run)["__signature__"] = signature.replace(parameters=keywords)
    run.__annotations__ = {name: parameter.annotation for name, parameter in known.items()}
    return run


def _parsed(parameter: inspect.Parameter, value: Any) -> Any:
    flag = flag_of(parameter)
    return value if value is None or flag is None or flag.parse is None else flag.parse(value)


def _in_typer(parameter: inspect.Parameter) -> inspect.Parameter:
    if (flag := flag_of(parameter)) is None:
        return parameter
    kind = flag.type or type_of(parameter.annotation.__origin__)
    complete = getattr(completion, flag.complete) if flag.complete else None
    how: dict[str, Any] = {"autocompletion": complete, "metavar": flag.metavar, "hidden": flag.hidden}
    if isinstance(flag, Positional):
        # Opening an unreadable file gives a better error than a usage error.
        info = typer.Argument(help=flag.help, readable=False, **how)
    else:
        names = flag.names or ([f"--{parameter.name.replace('_', '-')}"] if kind is bool else [])  # without a --no-
        info = typer.Option(*names, help=flag.help, min=flag.min, max=flag.max, rich_help_panel=flag.section, **how)
    is_optional = parameter.default is None
    return parameter.replace(annotation=Annotated[kind | None if is_optional else kind, info])


def _parameter(one: Option, section: str) -> inspect.Parameter:
    kind: Any = Literal[one.choices] if one.choices else one.type
    metavar = f"<{'|'.join(one.choices)}>" if one.choices else one.metavar
    flag = Flag(help=one.help, section=section, metavar=metavar, min=one.min, max=one.max)
    hint = Annotated[kind | None, flag]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hint)
