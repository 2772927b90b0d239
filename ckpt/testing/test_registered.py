from __future__ import annotations

from ckpt.base.entries import entries, load
from ckpt.options.command import GROUP
from ckpt.plan import registry
from ckpt.testing.commands import CommandConformance
from ckpt.testing.conformance import Conformance
from ckpt.testing.stores import StoreConformance


class TestRegistered(Conformance):
    declarations = registry.declarations()


class TestRegisteredStores(StoreConformance):
    declarations = registry.store_declarations()


class TestRegisteredCommands(CommandConformance):
    commands = tuple(load(where) for where in entries(GROUP).values())
