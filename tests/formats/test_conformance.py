"""`ckpt/testing/conformance.py`: the formats in `converters` pass the suite for third-party formats."""

from __future__ import annotations

from ckpt.plan import registry
from ckpt.testing import Conformance
from tests.formats.declarations import CONTAINERS, DECLARATIONS


def test_every_format_is_declared() -> None:
    assert sorted(d.format for d in DECLARATIONS) == sorted(n for n in registry.FORMATS if registry.get(n).reads)


class TestFormats(Conformance):
    declarations = DECLARATIONS
    containers = CONTAINERS
