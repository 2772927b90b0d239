"""The formats of installed packages through the suite."""

from __future__ import annotations

from ckpt import registry
from ckpt.testing.conformance import Conformance


class TestRegistered(Conformance):
    declarations = registry.declarations()
