"""Test suites for packages that add a format, a store or a command. They need pytest.

A `Declaration` gives a format's real sample and its truth. Register a function that returns it in the entry-point group
`ckpt.declarations`, with the format's name, and run

    pytest --pyargs ckpt.testing

or subclass `Conformance` in a test module and set `declarations`. For a store, use `StoreDeclaration`, the group
`ckpt.store_declarations` and `StoreConformance`. `CommandConformance` needs only the command's declaration.

May import: `ckpt`, `ckpt.base`, `ckpt.compare`, `ckpt.options`, `ckpt.plan`, `ckpt.runs`, `ckpt.stores`.
"""

import pytest

pytest.register_assert_rewrite("ckpt.testing.commands", "ckpt.testing.conformance", "ckpt.testing.stores")

from ckpt.testing.commands import CommandConformance  # noqa: E402
from ckpt.testing.conformance import Conformance, Declaration, Refusal, Sample, Tensors  # noqa: E402
from ckpt.testing.described_tensors import content  # noqa: E402
from ckpt.testing.stores import Served, StoreConformance, StoreDeclaration  # noqa: E402

__all__ = [
    "CommandConformance",
    "Conformance",
    "Declaration",
    "Refusal",
    "Sample",
    "Served",
    "StoreConformance",
    "StoreDeclaration",
    "Tensors",
    "content",
]
