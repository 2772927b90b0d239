"""The package version. A build writes the git tag's version into `_version.py`."""

from __future__ import annotations

from importlib import import_module

try:
    __version__: str = import_module("ckpt.base._version").__version__
except ImportError:  # not installed
    __version__ = "0.0+unknown"
