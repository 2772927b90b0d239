"""What a package that brings a format, a store or a command tests it with; needs pytest.

A `Declaration` says where a real sample comes from and what its truth is.  Register a function that returns it in the
entry-point group `ckpt.declarations`, under the format's name, and run

    pytest --pyargs ckpt.testing

or subclass `Conformance` in a test module, with `declarations`.  A store does the same with a `StoreDeclaration`, the
group `ckpt.store_declarations` and `StoreConformance`.  A command needs no declaration but its own; its suite is
`CommandConformance`.  Nothing else of ckpt imports this package.

May import: `ckpt`, `ckpt.base`, `ckpt.compare`, `ckpt.options`, `ckpt.plan`, `ckpt.runs`, `ckpt.stores`.
"""

import pytest

pytest.register_assert_rewrite("ckpt.testing.commands", "ckpt.testing.conformance", "ckpt.testing.stores")

from ckpt.testing.commands import CommandConformance  # noqa: E402
from ckpt.testing.conformance import Conformance, Declaration, Refusal, Sample, Tensors  # noqa: E402
from ckpt.testing.describing import content  # noqa: E402
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
