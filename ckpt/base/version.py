"""The version of this package, for the layers below it too: that of its tag, which a build writes beside it."""

from __future__ import annotations

from importlib import import_module

try:
    __version__: str = import_module("ckpt.base._version").__version__
except ImportError:  # run from a folder that was never installed
    __version__ = "0.0+unknown"
