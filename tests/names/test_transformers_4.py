"""`converters/names/transformers/relation.py`: transformers 4.51 loads the written names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.names.test_transformers import Saved, convert, to_hub
from tests.names.transformers_4 import digest

TABLE: dict[str, str] = json.loads(Path(__file__).with_name("transformers_4.json").read_text())
#: Model types without a tiny config. Each takes seconds.
LARGE = {"aria", "rt_detr", "rt_detr_v2", "depth_pro"}


@pytest.mark.parametrize("model_type", sorted(TABLE.keys() - LARGE))
def test_we_write_the_names_that_transformers_4_loads(model_type: str, tmp_path: Path) -> None:
    saved = Saved(model_type, tmp_path)
    assert digest(convert(to_hub(saved.in_memory()), tmp_path / "ours")) == TABLE[model_type]
    assert digest(saved.plain) != TABLE[model_type], "the names in memory are others"
