"""The command `ckpt`. Data goes to stdout, everything else to stderr.

docs/exit-codes.md lists the exit codes.

Each command declares itself in `ckpt.commands`, without typer. Import slow modules only inside the command that needs
them: `ckpt --help` imports neither numpy nor torch.

May import: `ckpt.base`, `ckpt.commands`, `ckpt.move`, `ckpt.options`, `ckpt.plan`, `ckpt.stores`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Annotated, Any

import typer

from ckpt.base.errors import UsageError
from ckpt.base.version import __version__
from ckpt.cli import command_registry
from ckpt.cli.parser import CommandGroup, add
from ckpt.cli.usage import say_error
from ckpt.options.command import Command
from ckpt.options.completion import completing_at_first_tab


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckpt {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def application(commands: Iterable[Command]) -> typer.Typer:
    app = typer.Typer(
        name="ckpt",
        cls=CommandGroup,
        help="Convert, verify and inspect checkpoints of large models, bit for bit, without a GPU.",
        context_settings={
            # underscores work too, like in DeepSpeed and Accelerate
            "token_normalize_func": lambda name: name.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
        },
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for one in commands:
        add(app, one)
    return app


@cache
def _whole() -> typer.Typer:
    return application(command_registry.all_commands())


def __getattr__(name: str) -> Any:
    """Create `app` on first access: it imports all commands."""
    if name == "app":
        return _whole()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal can't show
    typed = sys.argv[1:2]
    try:
        if typed and typed[0] in command_registry.places():
            command = command_registry.command(typed[0])
            command.start()
            app = application([command])
        else:
            app = _whole()
    except UsageError as error:
        say_error(error)
        sys.exit(error.exit_code)
    with completing_at_first_tab() if "--install-completion" in sys.argv else nullcontext():
        app(prog_name="ckpt")  # also for `python -m ckpt`: shells complete a command by its name
