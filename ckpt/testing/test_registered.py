"""The formats and stores of installed packages through the suites."""

from __future__ import annotations

from ckpt.plan import registry
from ckpt.testing.conformance import Conformance
from ckpt.testing.stores import StoreConformance


class TestRegistered(Conformance):
    declarations = registry.declarations()


class TestRegisteredStores(StoreConformance):
    declarations = registry.store_declarations()
