"""Loader for `fixtures/hostile/make.py`, the corpus with hostile files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def hostile() -> Any:
    """Import `fixtures/hostile/make.py` as a module."""
    spec = importlib.util.spec_from_file_location("hostile_make", ROOT / "fixtures/hostile/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make = hostile()
