"""`ckpt hash`."""

from __future__ import annotations

from typing import Annotated

from ckpt.base.flags import HOW, SHOWN, Flag
from ckpt.base.progress import progress
from ckpt.options import command as opt
from ckpt.options.command import LOOK, Command
from ckpt.options.printing import conclude, say_notes, say_source
from ckpt.plan.groups import Cast, Selection


def hash_(
    *,
    path: opt.PathArgument,
    selection: Selection,
    dtype: Annotated[
        Cast,
        Flag(help="Precision of the weights: their own, or cast like `convert`.", section="How it is done"),
    ] = "keep",
    tensors: Annotated[bool, Flag(help="Print the digest of every tensor too.", section=SHOWN)] = False,
    workers: Annotated[int, Flag(min=0, max=256, help="Threads that read. 0: by the processors.", section=HOW)] = 0,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Print digests of a checkpoint: equal in every format, sharding and order of files."""
    from ckpt import api

    checkpoint = api.open(path, **vars(selection))
    say_source(checkpoint, quiet=quiet)
    with progress(sum(tensor.nbytes for tensor in checkpoint.tensors.values()), "hash", quiet=quiet) as meter:
        found = api.hash(checkpoint, dtype=dtype, workers=workers, progress=meter)
    if not as_json:
        say_notes(() if quiet else found.not_hashed)
    conclude(found, found.lines(tensors or verbose), as_json, quiet=False)


COMMAND = Command(
    name="hash",
    section=LOOK,
    function=hash_,
    examples=(
        ("ckpt hash outputs", "a digest of weights, masters and optimizer each, whatever the format"),
        ("ckpt hash outputs-hf --tensors", "and of every tensor"),
    ),
    guide="verify.md",
    urls=("path", "config"),
    place=5,
    python="ckpt.api:hash",
)
