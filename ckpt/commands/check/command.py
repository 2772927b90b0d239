"""`ckpt check`."""

from __future__ import annotations

from typing import Annotated

from ckpt.base.flags import HOW, Flag
from ckpt.base.progress import progress
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import conclude
from ckpt.plan.groups import FormatOption, TagOption


def check(
    path: opt.PathArgument,
    format: FormatOption = "auto",
    tag: TagOption = None,
    every_byte: Annotated[
        bool,
        Flag(("--bytes",), help="Read every byte, and compare all stored checksums.", section=HOW),
    ] = False,
    values: Annotated[
        bool,
        Flag(help="Read every value: find NaN, infinities, zeros and untrained tensors.", section=HOW),
    ] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Say whether a checkpoint is whole, or each of a run's. Exit code 0: whole, 4: damaged or incomplete."""
    from ckpt.commands.check import checking

    total = checking.expected_bytes(path, tag) * (every_byte + values) if every_byte or values else 0
    with progress(total, "check", quiet=quiet or not total) as meter:
        report = checking.check(path, format, tag=tag, every_byte=every_byte, values=values, progress=meter)
    conclude(report, report.lines(), as_json, quiet)


COMMAND = Command(
    name="check",
    section=LOOK,
    function=check,
    examples=(
        ("ckpt check outputs", "each checkpoint of a run: is it whole, and if not, what is missing"),
        ("ckpt check outputs-hf --bytes", "with every byte read, and checksums compared where there are any"),
    ),
    guide="check.md",
    urls=("path",),
    place=2,
    python="ckpt.commands.check.checking:check",
)
