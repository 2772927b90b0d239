"""The options of the commands: those that several commands share, and those that formats declare for `convert`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt.base import streams
from ckpt.base.errors import CkptError, SeveralRunsError, UsageError, shown
from ckpt.base.streams import code_of_reader, coloured, say_ended
from ckpt.base.text import scheme_of
from ckpt.base.typed import short_dtype
from ckpt.cli import complete, defaults
from ckpt.cli.examples import EXAMPLES
from ckpt.cli.usage import say_error, saying_usage_errors
from ckpt.plan.options import MAX_SIZE, Option, options_of

DIFFERENT = 1

#: The sections of the help texts, and the options in them, by name; of any other the section is Options.
_SECTIONS = {
    "What is read": "format tag config replica complete_from from_a from_b tag_a tag_b base accept_base adapter "
    "expert_layout peft_version adapter_slot accept_setting model_only",
    "What is written": "output to dtype dequantize optimizer_dtype max_shard_size world_size manifest names overwrite",
    "How it is done": "max_memory workers check verify restart dry_run foreground cast exact rtol atol loads "
    "every_byte values weights combination density seed",
    "What is shown": "tensors tensor everything csv picture html only run",
    "The Hub": "push repo_id private revision create_pr commit_message",
    "The run": "strategy run_config ds_config batch_size seq_len dtype pure fused_cross_entropy eager_attention "
    "activation_offload recompute_modules",
    "GPUs": "gpus gpu_memory cp tp pp ep no_sequence_parallel",
    "Optimizer": "optimizer master_dtype state_dtype offload_optimizer offload_param",
    "LoRA": "lora_r lora_target_modules qlora",
}
_SECTION_OF = {name: title for title, names in reversed(_SECTIONS.items()) for name in names.split()}

Function = TypeVar("Function", bound=Callable[..., Any])


#: What options take, by their names.
DType = Literal["keep", "fp32", "bf16", "fp16"]
Only = Literal["weights", "optimizer", "all"]
Names = Literal["hub", "own"]
ExpertLayout = Literal["peft", "unsloth"]
OptimizerDType = Literal["keep", "fp32"]

#: What is given to be read may not be readable, which is no matter of usage: whoever opens it says so.
PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or the run folder it lies in.", readable=False)
]
FormatOption = Annotated[
    str, typer.Option(metavar="FORMAT", help="The format to read.", autocompletion=complete.sources)
]
TagOption = Annotated[
    str | None,
    typer.Option(
        "--tag",
        "--step",
        metavar="TAG",
        help="The step to take, by its folder's name or its number, instead of the one recorded as latest.",
        autocompletion=complete.tags,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(metavar="CONFIG", help="The model's config and tokenizer: a folder, a config.json or a Hub id."),
]
ShardSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Largest size of one weight file.")]
WorkersOption = Annotated[
    int, typer.Option(min=0, max=256, help="Threads that copy. 0: 8 on a node, to keep a disk busy.")
]
IgnoreFileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-file",
        metavar="NAME",
        help="Leave out this file next to the adapter, though it holds trained weights. Can be given several times.",
    ),
]
ExpertLayoutOption = Annotated[
    ExpertLayout | None,
    typer.Option(
        "--expert-layout",
        help="Who packed an adapter of stacked experts: peft, or unsloth before 2026.9.6. [default: as recorded]",
    ),
]
AdapterSlotOption = Annotated[
    str | None,
    typer.Option(
        "--adapter-slot",
        metavar="SLOT:RANK:ALPHA",
        help="The adapter that is meant of a run of Megatron-Bridge's MultiLoRA, as 1:8:16.",
    ),
]
PeftVersionOption = Annotated[
    str | None,
    typer.Option(
        "--peft-version",
        metavar="RELEASE",
        help="PEFT release that trained the adapter, such as 0.13, if its config records none.",
    ),
]
AcceptEntryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-setting", metavar="NAME", help="Ignore this unknown entry of adapter_config.json. Repeatable."
    ),
]
AcceptSettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-setting",
        metavar="NAME",
        help="Ignore this recorded setting, though it changes the model and the target cannot hold it. Repeatable.",
    ),
]
DequantizeOption = Annotated[
    bool, typer.Option("--dequantize", help="Take the plain values of quantized weights (MXFP4, bitsandbytes, FP8).")
]
NamesOption = Annotated[
    Names,
    typer.Option(help="hub: only what the config's architecture saves. own: other names are written as they are."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors and warnings of loss only.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Print every tensor or file.")]


# Groups of options, which a command takes as one argument each (`with_options`).


@dataclass(frozen=True)
class ReadOptions:
    """Options for the checkpoint that is read."""

    format: FormatOption = "auto"
    tag: TagOption = None
    config: ConfigOption = None
    accept_setting: AcceptSettingOption = None


@dataclass(frozen=True)
class Precision:
    """The precision in which weights are written."""

    dtype: Annotated[
        DType,
        typer.Option(help="Precision of weights: keep the model's own, or cast. fp32 takes the optimizer's masters."),
    ] = "keep"
    dequantize: DequantizeOption = False


@dataclass(frozen=True)
class Sharding:
    """The files into which a target is cut."""

    max_shard_size: ShardSizeOption = "5GB"
    world_size: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            "--world-size",
            min=1,
            max=MAX_SIZE,
            help="Ranks of a sharded target. [default: as many as the source has]",
        ),
    ] = None


@dataclass(frozen=True)
class Outcome:
    """What is done with a plan, and what is printed of it."""

    manifest: Annotated[
        bool, typer.Option(help="Write ckpt-manifest.json, the digests of what was written, for `ckpt verify`.")
    ] = True
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False
    as_json: JsonOption = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the output.")] = False
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Clear what a stopped conversion has kept for this output, and begin anew. [default: go on with it; "
            "in a store nothing is kept]",
        ),
    ] = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read back what was written, and compare it with the source. Exit code 1: different."
        ),
    ] = False
    quiet: QuietOption = False
    verbose: VerboseOption = False


@dataclass(frozen=True)
class HubTarget:
    """Where on the Hub a folder is pushed to."""

    repo_id: Annotated[
        str | None,
        typer.Option(
            "--repo-id",
            metavar="ORG/NAME",
            help="The repository on the Hub. [default: the run's hub_model_id; for a merge, with -merged behind it]",
        ),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch to push to, made where it is missing.")
    ] = None
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Push as a pull request against main.")] = False
    commit_message: Annotated[
        str | None, typer.Option("--commit-message", metavar="TEXT", help="Commit message on the Hub.")
    ] = None


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command, with the options of its groups each by its own name."""
    return {
        name: value
        for key, argument in arguments.items()
        for name, value in (vars(argument) if is_dataclass(argument) else {key: argument}).items()
    }


#: Arguments that may be URLs, by the function of the command.
_TAKES_URLS = {
    "convert": ("source", "path", "output", "config", "complete_from"),
    "resume": ("config",),
    "mount": ("path", "config"),
    "merge_lora": ("sources", "base", "config", "output"),
    "push": ("path",),
    "inspect": ("path", "config"),
    "check": ("path",),
    "hash_": ("path", "config"),
    "verify": ("a", "b", "adapter", "config"),
    "diff": ("a", "b", "config"),
}
_URL = re.compile(r"(?:-o|--(?:output|config|base|adapter|complete-from)=)?[a-z][a-z0-9+.-]+://(.*)", re.DOTALL)
#: What the environment and a table say for yes.
_TRUE = ("1", "t", "true", "y", "yes", "on")
#: Those that are no places, whatever they look like.
_TEXTS = ("commit_message", "tensor")


def _with_urls(command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace each URL in `arguments` by a local stand-in.  UsageError where the argument takes no URL."""

    def placed(value: Any, is_taken: bool) -> Any:
        if isinstance(value, list):
            return [placed(one, is_taken) for one in value]
        if not isinstance(value, (str, Path)) or (scheme := scheme_of(value)) is None:
            return value
        if not is_taken:
            said, url = f"`ckpt {command.strip('_').replace('_', '-')}` takes no URL here", str(value).partition(":")[2]
            found = f"{scheme}://{url.lstrip('/')}"
            raise UsageError(said, found=found, hint="give a local path, or copy it there first")
        from ckpt.stores import standins

        return type(value)(standins.place(str(value)))

    taken = _TAKES_URLS.get(command, ())
    return {name: value if name in _TEXTS else placed(value, name in taken) for name, value in arguments.items()}


def guarded(function: Function) -> Function:
    """Turn our errors into one message on stderr and their exit code; a user's mistake gets no traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from ckpt.move.files import translate_os_errors

        try:
            with translate_os_errors():
                result = function(*args, **_with_urls(function.__name__, kwargs))
                sys.stdout.flush()
                return result
        except CkptError as error:
            if isinstance(error.__cause__, BrokenPipeError) and (code := code_of_reader()) is not None:
                raise typer.Exit(code) from None
            with contextlib.suppress(CkptError, typer.Exit):  # the options themselves may be at fault
                error.hint = error.hint and _for_command(error.hint, function.__name__.strip("_").replace("_", "-"))
            say_error(error, *_commands(error), *getattr(error, "__notes__", ()))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(say_ended(interrupt)) from None

    return run  # type: ignore[return-value]


#: An option in a hint, but not one inside a command in backticks.
_HINTED = re.compile(r"`ckpt [^`]*`|(?<![\w-])(--[a-z][a-z-]*)")


def _for_command(hint: str, name: str) -> str:
    """Return `hint` with the options of the command `name`; an option of `ckpt convert` alone is named as one."""
    known = _options_of(name) if "--" in hint else set()
    if not known:
        return hint
    others: dict[str, None] = {}

    def renamed(found: re.Match[str]) -> str:
        option = found[1]
        if option and option not in known:
            if f"{option}-a" in known:
                return f"{option}-a"
            others[option] = None
        return found[0]

    hint = _HINTED.sub(renamed, hint)
    elsewhere = [option for option in others if option in _options_of("convert")]
    if not elsewhere or "convert" in hint:
        return hint
    return f"{hint} (`ckpt convert` has {' and '.join(elsewhere)}, `ckpt {name}` has not)"


def _options_of(name: str) -> set[str]:
    """Return all options of a command, with those that formats declare."""
    from ckpt.cli import COMMANDS

    callback = next((members[name] for members in COMMANDS.values() if name in members), None)
    if callback is None:
        return set()
    params = _complete(name, inspect.unwrap(callback)).params
    return {option for param in params for option in (*param.opts, *param.secondary_opts)}


def _commands(error: CkptError) -> list[str]:
    """Return the command for each run if there are several to choose from."""
    if not isinstance(error, SeveralRunsError):
        return []
    path, normal = shown(str(error.path)), os.path.normpath  # of a URL it makes something else, and of both alike
    asked = [word for word in sys.argv[1:] if not word.startswith("-") and normal(word) == normal(path)]
    words = sys.argv[1:] if asked else [*sys.argv[1:], path]
    place = max(i for i, word in enumerate(words) if word == (asked[-1] if asked else path))
    return [f"  {shlex.join(['ckpt', *words[:place], shown(run), *words[place + 1 :]])}" for run in error.runs]


#: How the title of a section of options begins that formats declare; `ckpt convert --help` says what these mean.
_OF_FORMATS = "Options of "
#: What typer calls types, and what people read in their place.
_TYPES = {"<int range>": "N", "<int>": "N", "<float>": "X", "<path>": "PATH", "<str>": "TEXT", "<list[str]>": "TEXT"}


class _Help:
    """Help in sections with examples at the end, as plain text; a format's options have a `rich_help_panel`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with saying_usage_errors(f"{parent.command_path} {info_name}" if parent else "ckpt"):
            return super().make_context(info_name, args, parent, **extra)  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_sections(self, formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
        for title, records in sections.items():
            with formatter.section(_bold(title)):
                formatter.write_dl(records)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *_SECTIONS, "Options")}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                kind = "Arguments" if is_argument else _SECTION_OF.get(param.name, "Options")
                name, _, taken = record[0].partition(" <")
                name += "" if is_argument or not taken else f" {_TYPES.get(f'<{taken}', f'<{taken}')}"
                sections.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append((name, record[1]))
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
            for command, meaning in EXAMPLES[name]:
                formatter.write(f"{'':{formatter.current_indent}}{command}\n")
                with formatter.indentation():
                    formatter.write_text(meaning)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _bold(title: str) -> str:
    return typer.style(title, bold=True) if coloured(sys.stdout) else title


class Command(_Help, TyperCommand):
    """A command with its help in sections."""


class Commands(_Help, TyperGroup):
    """The commands.  Some get the options that formats declare when they are run, so that the others stay fast."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sections.setdefault(command.rich_help_panel, []).append((name, command.help.split("\n\n")[0]))
        self.format_sections(formatter, sections)

    def invoke(self, ctx: Any) -> Any:
        with saying_usage_errors(ctx.command_path):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # `ckpt help convert`
            args = [*args[1:2], "--help"]
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if "" in args[1:]:  # no path: `Path("")` would be the current folder
            before = args[args.index("", 1) - 1]
            where = before if before.startswith("-") else None
            raise UsageError("an argument is empty", found=where, hint="is a variable of the shell not set?")
        for before, arg in pairwise(args):
            url = _URL.fullmatch(arg) if before.strip("-").replace("-", "_") not in _TEXTS else None
            if url and not {"", "."}.isdisjoint(url[1].removesuffix("/").split("/")[1:]):
                # `Path` would fold it into another key
                raise UsageError("a part of this URL's path is empty or a dot", found=shown(arg))
        resolved: Any = super().resolve_command(ctx, _with_short_dtypes(args))
        name, command, rest = resolved
        if name in _WITH_FORMATS:
            command = _complete(name, inspect.unwrap(command.callback))
        _check_spelled_once(command.params, rest)
        found = defaults.of_command(name, command.params)
        found = {key: (short_dtype(one) or one) if key.endswith("dtype") else one for key, one in found.items()}
        ctx.default_map = {name: found}
        streams.json_by_default = str(found.get("as_json")).lower() in _TRUE
        return name, command, rest


def _check_spelled_once(params: Sequence[Any], args: Sequence[str]) -> None:
    """Raise UsageError if one option is given under two names, such as --tag and --step: click takes the last."""
    given = [word.partition("=")[0].replace("_", "-") for word in takewhile(lambda word: word != "--", args)]
    for param in params:
        names = [name for name in param.opts if name.startswith("--") and name in given]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are one option", hint=f"leave {names[-1]} out")


def _with_short_dtypes(args: Sequence[str]) -> list[str]:
    """Return the words of a command line with `bf16` for `bfloat16` and `torch.bfloat16` after options of dtypes."""
    words, before = [], ""
    for word in args:
        option, equals, value = word.partition("=")
        if option.startswith("--") and option.endswith("dtype") and equals:
            word = f"{option}={short_dtype(value) or value}"
        elif before.startswith("--") and before.endswith("dtype"):
            word = short_dtype(word) or word
        words.append(word)
        before = word
    return words


#: Commands that take the options of formats.
_WITH_FORMATS = ("convert", "resume", "mount")


def _complete(name: str, function: Callable[..., Any]) -> Any:
    """Return the command `name` alone, with the options that formats declare if it takes them."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    declared = _with_declared(function) if name in _WITH_FORMATS else with_options(function)
    alone.command(name, cls=Command)(guarded(declared))
    return typer.main.get_command(alone)


@guarded
def _with_declared(function: Callable[..., Any]) -> Callable[..., Any]:
    from ckpt.plan import registry

    return with_options(function, registry.declared_options())


def with_options(
    function: Callable[..., Any], owners: Mapping[type, Sequence[str]] | None = None
) -> Callable[..., Any]:
    """`function` with an option for each field of its groups, and for each that the dataclasses of formats declare.

    A group arrives as one object.  Of the formats' options (`owners` says whose each dataclass is) those that were
    asked for arrive in the argument `options`, by name.  Raises UsageError where two have the same name.
    """
    signature = inspect.signature(function, eval_str=True)
    known: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in signature.parameters.items():
        group, is_group = parameter.annotation, is_dataclass(parameter.annotation)
        if is_group:
            members = _members(group)
            groups[name] = group, list(members)
            known |= members
        elif name != "options":
            known[name] = parameter
    declared: dict[str, Option] = {}
    for owner, formats in (owners or {}).items():
        for one in options_of(owner):
            if one.name in known:
                raise UsageError(
                    f"two options of `ckpt convert` are called --{one.name.replace('_', '-')}",
                    found=f"one of them is of {', '.join(formats)}",
                    hint="uninstall the package of one of the two, or rename its option",
                )
            declared[one.name] = one
            known[one.name] = _parameter(one, f"{_OF_FORMATS}{', '.join(formats)}")

    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in declared}
        made: dict[str, Any] = {
            name: group(**{member: arguments.pop(member) for member in members})
            for name, (group, members) in groups.items()
        }
        if "options" in signature.parameters:
            made["options"] = {name: value for name, value in given.items() if value != declared[name].default}
        return function(**arguments, **made)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in known.values()]
    vars(run)["__signature__"] = signature.replace(parameters=keywords)
    run.__annotations__ = {name: parameter.annotation for name, parameter in known.items()}
    return run


@functools.cache
def _members(group: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(group, eval_str=True).parameters


def _parameter(one: Option, section: str) -> inspect.Parameter:
    kind: Any = Literal[one.choices] if one.choices else one.type
    flags = [f"--{one.name.replace('_', '-')}"] if one.type is bool else []  # without a --no- of its own
    metavar = f"<{'|'.join(one.choices)}>" if one.choices else one.metavar
    info = typer.Option(*flags, help=one.help, min=one.min, max=one.max, metavar=metavar, rich_help_panel=section)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=Annotated[kind | None, info]
    )
