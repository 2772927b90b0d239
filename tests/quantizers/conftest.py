"""Tests that run other libraries. `make test-quantizers` runs them in an environment with these libraries."""

from __future__ import annotations

import pytest

from tests.quantized.test_quantize import llama, moe  # noqa: F401
from tests.quantizers.llama_cpp import SOURCES


@pytest.fixture(autouse=True, scope="session")
def environment() -> None:
    """Skip everywhere else. In this environment, a missing library is a failure."""
    if not SOURCES.is_dir():
        pytest.skip("`make test-quantizers` makes the environment for this test")
