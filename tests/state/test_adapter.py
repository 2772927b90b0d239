"""`ckpt/adapters/names.py` and `ckpt/adapters/config.py`: PEFT's adapters, their config and their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.adapters.config import parse_config
from ckpt.adapters.names import ADAPTER_CONFIG, parse_name


@pytest.mark.parametrize(
    ("name", "kind", "in_file"),
    [
        ("base_model.model.a.b.lora_A.default.weight", "lora_A", "base_model.model.a.b.lora_A.weight"),
        ("base_model.model.a.b.lora_B.default.bias", "lora_B.bias", "base_model.model.a.b.lora_B.bias"),
        ("base_model.model.e.lora_embedding_A.default", "lora_embedding_A", "base_model.model.e.lora_embedding_A"),
        (
            "base_model.model.a.lora_magnitude_vector.default.weight",
            "lora_magnitude_vector",
            "base_model.model.a.lora_magnitude_vector",
        ),
        (
            "base_model.model.a.lora_magnitude_vector",
            "lora_magnitude_vector",
            "base_model.model.a.lora_magnitude_vector",
        ),
        ("base_model.model.h.modules_to_save.default.weight", "modules_to_save", "base_model.model.h.weight"),
        ("model.x.lora_A.weight", "lora_A", "base_model.model.model.x.lora_A.weight"),
    ],
)
def test_names_of_an_adapters_tensors(name: str, kind: str, in_file: str) -> None:
    assert (parse_name(name).kind, parse_name(name).in_file) == (kind, in_file)
    assert parse_name(parse_name(name).in_file).in_file == in_file or kind == "modules_to_save"


def test_patterns_match_as_pefts_do() -> None:
    from peft.utils.other import get_pattern_key

    patterns = {"q_proj": 2, r"layers\.1\..*": 3, "mlp.up_proj": 4}
    config = parse_config({"peft_type": "LORA", "r": 8, "rank_pattern": patterns}, Path("adapter_config.json"))
    for key in ("model.layers.0.q_proj", "model.layers.1.k_proj", "x.mlp.up_proj", "xmlp.up_proj", "my_q_proj"):
        assert config.rank_of(key) == patterns.get(get_pattern_key(patterns, key), 8)
    assert ADAPTER_CONFIG == "adapter_config.json"
