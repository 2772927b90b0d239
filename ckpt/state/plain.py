"""Training state that loads without a framework."""

from __future__ import annotations

import datetime
from collections import deque
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckpt.containers.torchfile.values import Array, StoredDict, StoredTensor
from ckpt.containers.torchfile.write import NewTensor
from ckpt.plan.dtypes import DType

_SCALARS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, slice, range),
    *(DType, Array, PurePosixPath, PureWindowsPath),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)


def is_plain(value: Any) -> bool:
    """Return True if any Python with torch can load the value."""
    if type(value) in (list, tuple, set, frozenset, deque):
        return all(map(is_plain, value))
    if type(value) in (dict, StoredDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return isinstance(value, StoredTensor | NewTensor) or type(value) in _SCALARS
