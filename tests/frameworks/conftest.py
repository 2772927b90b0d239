"""Tests of newer frameworks than the suite's own environment has: `make test-frameworks` runs them in theirs."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

#: The first one whose Megatron-LM starts as `tests.frameworks.worker` starts it.
_FIRST = "0.18"
#: And whose specs `tests.frameworks.engine_worker` builds over Transformer Engine's modules.
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
