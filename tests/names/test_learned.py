"""The tables that were learned of transformers, against models that it builds of configs which they have not seen."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ckpt.errors import CkptError
from converters.names.hub import asked, learned
from tests.support.architectures import tiny_config

transformers = pytest.importorskip("transformers", minversion="5.23")


def config_of(model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(tiny_config(model_type).to_dict(), default=str))
    return {**config, "architectures": [learned.table(model_type)["cls"]]}  # type: ignore[index]


def changed(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Some sizes another, some flags turned round, some entries left out."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            value = changed(value, chance)
        elif chance.random() < 0.3 and not name.endswith("token_id") and name != "is_encoder_decoder":
            if isinstance(value, bool):
                value = not value
            elif isinstance(value, int):
                value = chance.choice((value + 1, 2 * value, 4 * value))
        if isinstance(value, dict) or "layer" in name or name in LOOKED_AT or chance.random() > 0.05:
            found[name] = value
    return found


#: What cannot be left out: the class of a config, and what makes a model large.
LOOKED_AT = ("model_type", "architectures", "depth")


@pytest.mark.parametrize("model_type", learned.model_types())
def test_a_table_foretells_models_that_were_not_built_when_it_was_learned(model_type: str) -> None:
    chance, compared = random.Random(2), 0
    config = config_of(model_type)
    for number in range(16):
        other = changed(config, chance) if number else config
        try:
            truth = asked.saved(other)
        except CkptError:
            continue  # transformers refuses it
        found = learned.saved(other)
        if found is None:
            continue
        assert truth is not None
        assert (found.required, found.optional) == (truth.required, truth.optional), other
        compared += 1
        if compared == 4:
            break
    assert compared >= 2


def test_a_table_has_no_answer_to_what_it_does_not_know() -> None:
    config = config_of("qwen2_5_vl")
    assert learned.saved(config) is not None
    for part, change in (
        ("vision_config", {"fullatt_block_indexes": [1]}),  # which was always the same
        ("vision_config", {"model_type": "clip_vision_model"}),
        ("text_config", {"hidden_size": 0}),
        ("text_config", {"hidden_size": "32"}),
        ("text_config", {"num_hidden_layers": 1 << 30}),
        ("text_config", {"hidden_size": 1 << 41}),
    ):
        assert learned.saved({**config, part: {**config[part], **change}}) is None, change
    assert learned.saved({name: value for name, value in config.items() if name != "vision_config"}) is None
    assert learned.saved({**config, "architectures": ["Qwen2_5_VLModel"]}) is None
    assert learned.saved({**config_of("mamba"), "time_step_rank": "auto"}) is None


def test_layers_that_were_never_seen_have_no_answer() -> None:
    table = {
        "cls": "X",
        "rows": {"h ? layer_types[#]=mamba": ["layers.#.a"], "2*h+3 ? !layer_types[#]=mamba": ["layers.#.b"]},
        "counts": {"layers.": "n"},
        "defaults": {"layer_types": None},
        "seen": {"layer_types": ["attention", "mamba"]},
    }
    config = {"h": 4, "n": 2, "layer_types": ["mamba", "attention"]}
    assert dict(learned.tensors(table, table["rows"], learned.scope(table, config))) == {
        "layers.0.a": (4,),
        "layers.1.b": (11,),
    }
    for layers in (None, ["mamba"], ["mamba", "conv"]):
        with pytest.raises(learned.NoAnswerError):
            dict(learned.tensors(table, table["rows"], learned.scope(table, {**config, "layer_types": layers})))
    by_rule = {**table, "lists": {"layer_types": [["mamba", "#+1%every"], ["attention", ""]]}}
    scope = learned.scope(by_rule, {**config, "layer_types": None, "every": 2})
    assert dict(learned.tensors(by_rule, table["rows"], scope)) == {"layers.0.b": (11,), "layers.1.a": (4,)}
