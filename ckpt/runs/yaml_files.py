"""YAML or JSON files with a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.move.files import translate_os_errors
from ckpt.move.source import read_file

_MAX_BYTES = 1 << 20


def read_run_config(path: Path) -> Mapping[str, Any]:
    """Raise NotFoundError or CorruptError."""
    import yaml

    with translate_os_errors(path):
        content = read_file(path, _MAX_BYTES + 1)
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser, eight times as fast
        found = yaml.load(content, loader) if len(content) <= _MAX_BYTES else None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CorruptError("this is neither YAML nor JSON", path=path, found=str(error).splitlines()[0]) from error
    if not isinstance(found, dict):
        raise CorruptError("this is not a run config", path=path, expected="an object with names")
    return found
