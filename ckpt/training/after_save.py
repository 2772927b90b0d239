"""The process that `ckpt.TrainerCallback` starts for one checkpoint: `python -m ckpt.training.after_save JSON`.

It checks, converts, verifies and pushes, as far as it is asked to, prints a line for each, and exits with the code of
the first error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import ckpt
from ckpt.base.errors import CkptError, CorruptError


@dataclass(frozen=True)
class AfterSave:
    """What is done with the checkpoint at `path`: `output` is where it is converted to."""

    path: str
    output: str
    to: str | None = "hf"
    check: bool = True
    verify: bool = True
    push: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)  # a dtype of torch's by its name


def carry_out(work: AfterSave) -> None:
    """Do it; CkptError where the checkpoint is not whole, or what was converted is not what it holds."""
    if work.check:
        checked = ckpt.check(work.path)
        if not checked.whole:
            raise CorruptError("the checkpoint is not whole", path=work.path, found="; ".join(checked.lines()))
        print(f"{work.path} is whole")
    if work.to is None:
        return
    # What a killed process left may be of the same step as it was before the run saved it again.
    how: dict[str, Any] = {"overwrite": True, "restart": True, "verify": work.verify}
    done = ckpt.convert(work.path, work.to, work.output, **how, **work.options)
    print(f"{work.path} is converted to {done.path}")
    if work.verify:
        print(f"{done.path} is verified")
    if work.push:
        print(f"{done.path} is pushed to {ckpt.push(done.path, work.push).url}")


def main() -> int:
    os.nice(10)  # training goes first
    try:
        carry_out(AfterSave(**json.loads(sys.argv[1])))
    except CkptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
