"""Placeholder for `ckpt.StorageReader` without torch."""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import UsageError


class StorageReader:
    """Reader of a checkpoint in any format for torch's `dcp.load`. It needs torch, which is not installed here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise needs_torch("ckpt.StorageReader")


def needs_torch(what: str) -> UsageError:
    return UsageError(f"{what} needs torch, but torch is not installed", hint="pip install torch")
