"""The command `ckpt`. Data goes to stdout, everything else to stderr.

docs/exit-codes.md lists the exit codes.

Each command declares itself in `ckpt.commands`, without typer. Import slow modules only inside the command that needs
them: `ckpt --help` imports neither numpy nor torch.

May import: `ckpt.base`, `ckpt.commands`, `ckpt.move`, `ckpt.options`, `ckpt.plan`, `ckpt.stores`.
"""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from ckpt import commands
from ckpt.base.errors import UsageError
from ckpt.base.version import __version__
from ckpt.cli.parser import CommandGroup
from ckpt.cli.usage import say_error
from ckpt.options.completion import completing_at_first_tab


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckpt {__version__}")
        raise typer.Exit


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


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal can't show
    try:
        for name in {*sys.argv[1:2]} & commands.places().keys():
            commands.command(name).start()
    except UsageError as error:
        say_error(error)
        sys.exit(error.exit_code)
    with completing_at_first_tab() if "--install-completion" in sys.argv else nullcontext():
        app(prog_name="ckpt")  # also for `python -m ckpt`: shells complete a command by its name
