"""The process started by `ckpt.TrainerCallback` for one checkpoint: `python -m ckpt.training.after_save JSON`."""

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
    path: str
    output: str
    to: str | None = "hf"
    check: bool = True
    verify: bool = True
    push: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)  # a torch dtype by its name


def carry_out(work: AfterSave) -> None:
    """Raise CorruptError if the checkpoint is incomplete, and any error from ckpt's functions."""
    if work.check:
        checked = ckpt.check(work.path)
        if not checked.whole:
            raise CorruptError("the checkpoint is not whole", path=work.path, found="; ".join(checked.lines()))
        print(f"{work.path} is whole")
    if work.to is None:
        return
    # A killed process may have left output for the same step, saved again since.
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
