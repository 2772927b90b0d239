"""The command `ckpt`.  Data goes to stdout, everything else to stderr.

Exit codes: 0 done or equal; 1 different, or beyond a tolerance; 2 usage; 3 not found or not recognised; 4 corrupt or
incomplete; 5 refused as unsafe; 6 would lose information; 7 I/O, no space or no memory; 70 an error of ckpt itself;
130 interrupted (Ctrl-C); 141 the reader of its output left; 143 terminated (SIGTERM).

A module for each few commands, `options` and `text` for what they share.  May import everything in ckpt, but what is
slow to import only in the command that needs it: `ckpt --help` imports neither numpy nor torch.

May import: `ckpt.api`, `ckpt.base`, `ckpt.commands`, `ckpt.compare`, `ckpt.move`, `ckpt.pictures`, `ckpt.plan`,
`ckpt.processes`, `ckpt.runs`, `ckpt.stores`, `ckpt.views`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ckpt.base.version import __version__
from ckpt.cli import complete, quick
from ckpt.cli.clean import clean
from ckpt.cli.convert import convert
from ckpt.cli.doctor import doctor
from ckpt.cli.look import estimate_, formats, inspect
from ckpt.cli.lora import merge_lora, push
from ckpt.cli.mount import mount
from ckpt.cli.options import Command, Commands, guarded, with_options
from ckpt.cli.resume import resume
from ckpt.cli.verify import check, diff, hash_, verify
from ckpt.processes.launch import silence_all_but_one

app = typer.Typer(
    name="ckpt",
    cls=Commands,
    help="Convert, verify and inspect checkpoints of large models, bit for bit, without a GPU.",
    context_settings={
        # options may be typed with underscores, as DeepSpeed's and Accelerate's users do
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
#: The commands, by the sections of the help.
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Convert and go on": {
        "convert": with_options(convert),
        "resume": with_options(resume),
        "mount": with_options(mount),
        "merge-lora": with_options(merge_lora),
        "push": with_options(push),
        "clean": clean,
    },
    "Look and compare": {
        "inspect": with_options(inspect),
        "check": check,
        "verify": with_options(verify),
        "diff": with_options(diff),
        "hash": hash_,
    },
    "Know beforehand": {"estimate": with_options(estimate_), "formats": formats, "doctor": doctor},
}
for _section, _members in COMMANDS.items():
    for _name, _command in _members.items():
        app.command(_name, cls=Command, rich_help_panel=_section)(guarded(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckpt {__version__}")
        raise typer.Exit


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
            stream.reconfigure(errors="backslashreplace")  # names of any language on a terminal of any
    if "convert" in sys.argv[1:2]:
        silence_all_but_one()
    complete.offer_at_the_first_tab()
    quick.command(app)(prog_name="ckpt")  # for `python -m ckpt` too: shells complete the name of a command
