"""Tests of newer frameworks. `make test-frameworks` runs them in their own environments."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

#: First version supported by `tests.frameworks.worker`.
_FIRST = "0.18"
#: First version supported by `tests.frameworks.engine_worker` with Transformer Engine's modules.
_WITH_ENGINE = "0.19"


def _installed() -> Version | None:
    try:
        return Version(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        return None


_version = _installed()
collect_ignore_glob = [] if _version is not None and _version >= Version(_FIRST) else ["test_*.py"]
if _version is not None and _version < Version(_WITH_ENGINE):
    collect_ignore_glob.append("test_engine.py")
