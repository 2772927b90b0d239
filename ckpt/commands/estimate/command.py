"""`ckpt estimate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from ckpt.base.errors import UsageError, printable
from ckpt.base.flags import SHOWN, WRITTEN, Flag, Positional
from ckpt.base.words import Message
from ckpt.commands.drawings import check_place, write
from ckpt.commands.estimate.options import Gpus, Lora, Stated, StateOptions, Training
from ckpt.options import command as opt
from ckpt.options.command import BEFOREHAND, Command
from ckpt.options.printing import say_notes


def estimate_(
    *,
    model: Annotated[
        str,
        Positional(metavar="MODEL", help="A config.json or its folder, a Hub id, a checkpoint, or Axolotl's YAML."),
    ],
    stated: Stated,
    training: Training,
    on: Gpus,
    states: StateOptions,
    lora: Lora,
    picture: Annotated[
        Path | None,
        Flag(metavar="OUT.svg", help="Draw it: bars by strategy under the GPU's limit.", section=SHOWN),
    ] = None,
    overwrite: Annotated[bool, Flag(help="Replace an existing picture.", section=WRITTEN)] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Estimate what each GPU will hold in training, by strategy, and suggest one that fits."""
    if picture is not None:
        check_place(picture, ".svg")
    elif overwrite:
        raise UsageError(Message("{overwrite=True} goes with --picture"))
    given = opt.by_name({"stated": stated, "training": training, "on": on, "states": states, "lora": lora})
    from ckpt.commands.estimate.estimating import estimate

    found = estimate(model, **given)
    if picture is not None:
        write(picture, found.picture(), overwrite=overwrite, quiet=quiet)
    if not quiet:
        say_notes(found.subject.notes)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    for line in found.lines():
        print(printable(line))


COMMAND = Command(
    name="estimate",
    section=BEFOREHAND,
    function=estimate_,
    examples=(
        ("ckpt estimate outputs-hf --gpus 8 --gpu-memory 80GB", "what fits on 8 GPUs of 80 GB"),
        ("ckpt estimate outputs-hf --strategy zero3 --offload-optimizer cpu", "one strategy alone"),
    ),
    guide="estimate.md",
    place=1,
    python="ckpt.commands.estimate.estimating:estimate",
)
