"""The errors of ckpt under their public name; the tree and the exit codes are in `ckpt.base.errors`."""

from ckpt.base.errors import (
    CkptError,
    CorruptError,
    HalfError,
    IncompleteError,
    LossError,
    NotFoundError,
    SeveralModelsError,
    SeveralRunsError,
    SourceGoneError,
    StorageError,
    UnsafeError,
    UsageError,
)

__all__ = [
    "CkptError",
    "CorruptError",
    "HalfError",
    "IncompleteError",
    "LossError",
    "NotFoundError",
    "SeveralModelsError",
    "SeveralRunsError",
    "SourceGoneError",
    "StorageError",
    "UnsafeError",
    "UsageError",
]
