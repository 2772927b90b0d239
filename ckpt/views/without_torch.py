"""`ckpt.StorageReader` where torch is not installed: a class to be looked at, and not to be made."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import UsageError


class StorageReader:
    """Reads a checkpoint of any format for torch's `dcp.load`.  Making one needs torch, which is not installed here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise needs_torch("ckpt.StorageReader")


def needs_torch(what: str) -> UsageError:
    """The error for a call that takes torch."""
    return UsageError(f"{what} needs torch, which is not installed", hint="pip install torch")
