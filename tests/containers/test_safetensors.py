"""Names of tensors that a safetensors file has no place for."""

from __future__ import annotations

import pytest

from ckpt.containers.safetensors import Planned, build_header
from ckpt.errors import LossError
from ckpt.plan.dtypes import FLOAT32


@pytest.mark.parametrize("name", ["__metadata__", "weight\ud800"])
def test_are_refused(name: str) -> None:
    with pytest.raises(LossError, match="no place for a tensor of this name"):
        build_header([Planned(name, FLOAT32, (2,))], {})
