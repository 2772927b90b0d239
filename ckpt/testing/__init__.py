"""What a package that brings a format or a store tests it with; needs pytest.

A `Declaration` says where a real sample comes from and what its truth is.  Register a function that returns it in the
entry-point group `ckpt.declarations`, under the format's name, and run

    pytest --pyargs ckpt.testing

or subclass `Conformance` in a test module, with `declarations`.  A store does the same with a `StoreDeclaration`, the
group `ckpt.store_declarations` and `StoreConformance`.  Nothing else of ckpt imports this package.

May import: `ckpt`, `ckpt.base`, `ckpt.compare`, `ckpt.plan`, `ckpt.runs`, `ckpt.stores`.
"""

import pytest

pytest.register_assert_rewrite("ckpt.testing.conformance", "ckpt.testing.stores")

from ckpt.testing.conformance import Conformance, Declaration, Refusal, Sample, Tensors  # noqa: E402
from ckpt.testing.describing import content  # noqa: E402
from ckpt.testing.stores import Served, StoreConformance, StoreDeclaration  # noqa: E402

__all__ = [
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
