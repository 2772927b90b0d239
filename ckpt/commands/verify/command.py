"""`ckpt verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ckpt.base.errors import UsageError
from ckpt.base.flags import HOW, READ, SHOWN, Flag, Positional
from ckpt.base.progress import progress
from ckpt.base.words import Keyword, Message, joined
from ckpt.commands.drawings import HeatMap
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import conclude, open_sides
from ckpt.plan.groups import (
    Comparison,
    ExpertLayoutOption,
    IgnoreFilesOption,
    PeftVersionOption,
    Sides,
)

if TYPE_CHECKING:
    from ckpt.compare.pairs import Report
    from ckpt.compare.training import RunReport


@dataclass(frozen=True)
class Claimed:
    adapter: Annotated[
        list[str] | None,
        Flag(
            metavar="ADAPTER",
            help="Check that B is A with this LoRA adapter merged in, and nothing else; repeatable, in order.",
            section=READ,
        ),
    ] = None
    expert_layout: ExpertLayoutOption = None
    peft_version: PeftVersionOption = None
    ignore_files: IgnoreFilesOption = None


@dataclass(frozen=True)
class VerifyModes:
    run: Annotated[
        bool,
        Flag(
            help="Compare the training states instead of the tensors: schedule, scaler, random states, data position.",
            section=SHOWN,
        ),
    ] = False
    quantized: Annotated[
        bool,
        Flag(
            help="Measure a quantized model's rounding errors against the plain model. Exit code 1: beyond the bound.",
            section=SHOWN,
        ),
    ] = False
    loads: Annotated[
        bool,
        Flag(help="Have transformers load A without data, and report what is wrong with it.", section=HOW),
    ] = False


def verify(
    *,
    a: Annotated[Path, Positional(metavar="A", help="A checkpoint or run folder.")],
    b: Annotated[Path | None, Positional(metavar="B", help="Another checkpoint, in any format.")] = None,
    sides: Sides,
    how: Comparison,
    kind: VerifyModes,
    claimed: Claimed,
    page: HeatMap,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Compare two checkpoints bit by bit, or a folder with its manifest. Exit code 0: equal, 1: different."""
    from ckpt import api
    from ckpt.move.listing import listed_once

    api.check_goes_together(a, b, how, sides, run=kind.run, loads=kind.loads, quantized=kind.quantized)
    if claimed.adapter or claimed.expert_layout or claimed.peft_version or claimed.ignore_files:
        others = {
            Message("{only}"): how.only != "all",
            Message("{cast=True}"): how.cast,
            Message("{exact=True}"): how.exact,
            Message("{run=True}"): kind.run,
            Message("{quantized=True}"): kind.quantized,
            Message("{loads=True}"): kind.loads,
            "--html": bool(page.html),
        }
        _verify_merge(
            a, b, sides, claimed, [name for name, is_given in others.items() if is_given], as_json, quiet, verbose
        )
        return
    if page.html and (b is None or kind.run or kind.quantized):
        raise UsageError(
            "--html needs two checkpoints",
            hint=Message("give A and B, without {run=True} and without {quantized=True}"),
        )
    if b is None:
        _verify_one(a, kind.loads, as_json, quiet)
        return
    with listed_once():
        one, other = open_sides(a, b, sides, quiet, verbose)
        page.check(one, other)
        with progress(0, "compare", quiet=quiet or kind.run) as meter:
            watched: dict[str, Any] = {"progress": meter, "expected": meter.expect}
            if kind.run:
                report: Report | RunReport = api.verify(one, other, run=True)
            elif kind.quantized:
                report = api.verify(one, other, quantized=True, **vars(how), **watched)
            else:
                report = api.verify(one, other, **vars(how), **watched, measured=page.html is not None)
    page.write(report, quiet=quiet)
    conclude(report, report.lines(verbose), as_json, quiet)


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
    from ckpt.commands.merge_lora.merge_proof import verify_merge

    others += [
        Message("{}", Keyword(name)) for name in ("from_a", "tag_a") if getattr(sides, name) not in ("auto", None)
    ]
    if merged is None or not claimed.adapter or others:
        raise UsageError(
            "--adapter needs a base and a merged model, and no other options",
            expected="ckpt verify BASE MERGED --adapter ADAPTER",
            found=joined(" ", others) or None,
        )
    with progress(0, "compare", quiet=quiet) as meter:
        report = verify_merge(
            base,
            merged,
            claimed.adapter,
            expert_layout=claimed.expert_layout,
            peft_version=claimed.peft_version,
            accept_settings=sides.accept_settings,
            ignore_files=claimed.ignore_files or (),
            format=sides.from_b,
            tag=sides.tag_b,
            config=sides.config,
            progress=meter,
            expected=meter.expect,
        )
    conclude(report, report.lines(verbose), as_json, quiet)


def _verify_one(path: Path, loads: bool, as_json: bool, quiet: bool) -> None:
    from ckpt import api
    from ckpt.compare import manifest
    from ckpt.stores.placeholder_files import local

    with progress(0 if loads else manifest.expected_bytes(local(path)), "hash", quiet=quiet or loads) as meter:
        report = api.verify(path, loads=True) if loads else api.verify(path, progress=meter)
    conclude(report, report.lines(), as_json, quiet)


COMMAND = Command(
    name="verify",
    section=LOOK,
    function=verify,
    examples=(
        ("ckpt verify outputs outputs-hf --only weights --cast", "two checkpoints of any formats, bit by bit"),
        ("ckpt verify outputs-hf", "a folder that ckpt wrote, with its manifest"),
    ),
    guide="verify.md",
    urls=("a", "b", "adapter", "config"),
    place=3,
    python="ckpt.api:verify",
)
