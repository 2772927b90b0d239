"""Checkpoint conversion and sharded-state toolkit.

    ckpt.convert("outputs", "hf", "outputs-hf")           # commands are functions, with paths and URLs
    ckpt.verify("outputs", "outputs-hf").equal
    ckpt.diff("base", "outputs-hf").layers                # changes by layer
    ckpt.inspect("outputs")                               # the result prints like the command
    ckpt.open("outputs")["model.norm.weight"][0:8]        # a lazy description; only these bytes are read
    ckpt.plan("outputs", "hf").run("outputs-hf")          # prove first, run later
    ckpt.mount("outputs", "hf")                           # a virtual folder during a `with` block
    ckpt.load_into(model, "outputs")                      # any format into a plain torch module
    ckpt.doctor("outputs").commands                       # usable commands
    ckpt.check("outputs").whole                           # nothing missing, truncated or damaged
    ckpt.resume("outputs")                                # the folder to resume from, on the current ranks
    ckpt.clean("outputs").remove()                        # delete unneeded staging folders and copies
    ckpt.StorageReader("outputs")                         # for torch's dcp.load, from any format into FSDP2
    Trainer(..., callbacks=[ckpt.TrainerCallback()])      # check, convert and verify each checkpoint in the background
    except ckpt.CkptError as error: ...                   # base class of all errors in `ckpt.base.errors`

Importing this package imports neither torch nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.base.version import __version__

if TYPE_CHECKING:
    # tests/api/test_keywords.py writes these imports
    from ckpt.api import convert, diff, hash, mount, open, plan, verify
    from ckpt.base.errors import CkptError
    from ckpt.commands.check.checking import check
    from ckpt.commands.clean.cleaning import clean
    from ckpt.commands.doctor.diagnosis import doctor
    from ckpt.commands.estimate.estimating import estimate
    from ckpt.commands.formats.formats import formats
    from ckpt.commands.inspect.inspecting import inspect
    from ckpt.commands.merge_lora.merge_proof import verify_merge
    from ckpt.commands.merge_lora.merging import merge_lora
    from ckpt.commands.push.pushing import push
    from ckpt.commands.resume.resuming import resume
    from ckpt.training.callback import TrainerCallback
    from ckpt.views.loading import load_into
    from ckpt.views.storage_reader import StorageReader

    __all__ = [
        "CkptError",
        "StorageReader",
        "TrainerCallback",
        "__version__",
        "check",
        "clean",
        "convert",
        "diff",
        "doctor",
        "estimate",
        "formats",
        "hash",
        "inspect",
        "load_into",
        "merge_lora",
        "mount",
        "open",
        "plan",
        "push",
        "resume",
        "verify",
        "verify_merge",
    ]
else:
    # Loaded first, so that no later import hides the function `plan`.
    from ckpt import plan

    del plan

#: Commands declare theirs (`Command.python`).
_FURTHER = {
    "CkptError": "ckpt.base.errors",
    "StorageReader": "ckpt.views.storage_reader",
    "TrainerCallback": "ckpt.training.callback",
    "load_into": "ckpt.views.loading",
    "open": "ckpt.api",
    "plan": "ckpt.api",
    "verify_merge": "ckpt.commands.merge_lora.merge_proof",
}


def _module_of(name: str) -> str | None:
    from ckpt.commands import own_places

    if name in _FURTHER or name not in own_places():
        return _FURTHER.get(name)
    function: str | None = import_module(f"ckpt.commands.{name}.command").COMMAND.python
    return function and function.partition(":")[0]


def __dir__() -> list[str]:
    from ckpt.commands import own_places

    return sorted(["__version__", *_FURTHER, *filter(_module_of, own_places())])


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ckpt.errors")
    if name == "__all__":
        return __dir__()
    if (place := _module_of(name)) is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    try:
        return getattr(import_module(place), name)
    except ModuleNotFoundError as error:
        if error.name == "fcntl":
            raise ImportError("ckpt does not run on Windows itself: use WSL") from error
        if error.name != "torch":
            raise
        return import_module("ckpt.views.without_torch").StorageReader  # only StorageReader needs torch
