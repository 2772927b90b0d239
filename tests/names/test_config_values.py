"""`converters/names/hub/config_values.py`, `save_pretrained.py`: config.json values accepted by transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.deepseek_v3 import CONFIG as DEEPSEEK_V3
from converters.names.families import composites, encoders, tables
from converters.names.hub import config_values, loading
from converters.names.hub.config_values import TYPES, unknown_values
from tests.support.commands import ckpt
from tests.support.model_files import merge_json

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16, "head_dim": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
#: Values that transformers refuses, without effect on tensors.
REFUSED: Mapping[str, list[dict[str, Any]]] = {
    "llama": [
        *({"hidden_act": value} for value in ("nope", None, 3)),
        *({"rope_parameters": value} for value in ({"rope_type": "nope"}, {"rope_type": "linear"}, 3)),
        *({"rope_scaling": {"rope_type": "nope"}}, {"dtype": "nope"}, {"dtype": 3}, {"rms_norm_eps": "x"}),
        *({"rms_norm_eps": None}, {"tie_word_embeddings": "x"}, {"max_position_embeddings": None}),
        *({"attention_dropout": "x"}, {"mlp_bias": None}, {"pad_token_id": 99}, {"pad_token_id": "x"}),
        *({"use_cache": "x"}, {"initializer_range": None}, {"eos_token_id": "x"}, {"id2label": 3}),
        *({"attn_implementation": "nope"}, {"_attn_implementation": "nope"}),
    ],
    "gemma3_text": [
        *({"layer_types": value} for value in (["full_attention"], ["nope", "nope"], "x")),
        *({"hidden_activation": "nope"}, {"sliding_window": "x"}),
    ],
}
#: Accepted values, and True if ckpt accepts them without transformers.
TAKEN: list[tuple[dict[str, Any], bool]] = [
    *(({"hidden_act": value}, True) for value in ("silu", "gelu", "relu2")),
    *(({"rope_parameters": value}, True) for value in ({"rope_type": "default", "rope_theta": 1e4}, None)),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, True),
    *(({"dtype": value}, True) for value in ("bfloat16", "float16", None)),
    *(
        (one, True)
        for one in (
            {"bos_token_id": None},
            {"eos_token_id": [1, 2]},
            {"pad_token_id": 3},
            {"pad_token_id": None},
            {"use_cache": False},
        )
    ),
    *((one, False) for one in ({"pad_token_id": -1}, {"nope": {"a": 1}}, {"id2label": {"0": "a"}})),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("models")
    for name, cls, config in (
        ("llama", LlamaForCausalLM, LlamaConfig),
        ("gemma3_text", Gemma3ForCausalLM, Gemma3TextConfig),
    ):
        cls(config(**SIZES, **HEADS)).bfloat16().save_pretrained(home / name)
    return {name: home / name for name in REFUSED}


def changed(folder: Path, place: Path, entry: dict[str, Any]) -> Path:
    copy = Path(shutil.copytree(folder, place))
    merge_json(copy / "config.json", entry)
    return copy


def last_line(folder: Path, out: Path) -> str:
    done = ckpt("convert", "hf", "hf", folder, "-o", out)
    assert done.code == 0, done.err
    return done.err.splitlines()[-1]


@pytest.mark.parametrize(("model", "entry"), [(m, one) for m, of in REFUSED.items() for one in of], ids=str)
def test_config_that_transformers_refuses_is_not_said_to_load(
    model: str, entry: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    import transformers

    source = changed(folders[model], tmp_path / "source", entry)
    cls = transformers.LlamaForCausalLM if model == "llama" else transformers.Gemma3ForCausalLM
    with pytest.raises(Exception):  # noqa: B017 errors of any kind
        cls.from_pretrained(source)
    said = last_line(source, tmp_path / "out")
    assert said.startswith("from_pretrained cannot load this folder: transformers does not accept config.json: "), said


@pytest.mark.parametrize(("entry", "is_known"), TAKEN, ids=str)
def test_config_that_transformers_takes_is_said_to_load(
    entry: dict[str, Any], is_known: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    source = changed(folders["llama"], tmp_path / "source", entry)
    LlamaForCausalLM.from_pretrained(source)
    assert last_line(source, tmp_path / "out").startswith("from_pretrained can load this folder: LlamaForCausalLM")
    assert (not [*unknown_values(json.loads((source / "config.json").read_text()))]) is is_known


def test_without_transformers_an_unknown_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "is_available", lambda: False)
    loads = loading.proved("LlamaForCausalLM")
    said = loading.accepted(loads, {**SIZES, "hidden_act": "nope"})
    assert said.can is None and "hidden_act: 'nope', and transformers is not installed" in said.sentence("out")
    assert loading.accepted(loads, {**SIZES, **HEADS, "hidden_act": "silu"}) is loads


def configs() -> Iterator[Any]:
    """Yield the config classes of all architectures in the tables, and their parts."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    names = (*tables.FAMILIES, *encoders.ENCODERS, *composites.COMPOSITES)
    waiting = [CONFIG_MAPPING[name] for name in names if name in CONFIG_MAPPING]
    done: set[Any] = set()
    while waiting:
        if (cls := waiting.pop()) in done:
            continue
        done.add(cls)
        if dataclasses.is_dataclass(cls):
            waiting += [one for one in cls.sub_configs.values() if one is not PreTrainedConfig]
            yield cls


def accepted_types(annotation: Any) -> set[str]:
    plain = {int: "int", float: "float", bool: "bool", type(None): "null"}
    if annotation in plain:
        return {plain[annotation]}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {one for part in typing.get_args(annotation) for one in accepted_types(part)}
    if typing.get_origin(annotation) is list and typing.get_args(annotation) in ((int,), (float,)):
        return {f"{typing.get_args(annotation)[0].__name__}s"}
    return set()


def test_every_architecture_accepts_the_types_of_the_table() -> None:
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    count = 0
    for cls in configs():
        for field in dataclasses.fields(cls):
            if field.name not in TYPES:
                continue
            annotation = field.type
            if isinstance(annotation, str):
                annotation = eval(annotation, {**vars(typing), **vars(sys.modules[cls.__module__])})
            refuses_null = config_values.NULL_EXCEPT.get(field.name, (cls.model_type,))
            needed = {*TYPES[field.name]} - ({"null"} if field.name in config_values.NULL_EXCEPT else set())
            assert accepted_types(annotation) >= needed, (cls.__name__, field.name)
            assert "null" in accepted_types(annotation) or cls.model_type in refuses_null, (cls.__name__, field.name)
            count += 1
    assert count > 1000
    for name, listed in config_values.LISTED.items():
        fields = (
            (cls.model_type, one.type) for cls in configs() for one in dataclasses.fields(cls) if one.name == name
        )
        assert {model_type for model_type, kind in fields if "list" in str(kind)} == {*listed}, name
    of_type = {cls.model_type: {one.name for one in dataclasses.fields(cls)} for cls in configs()}
    assert not any(of_type[name] & {*records} for name, records in config_values.RECORDS_OF.items())
    assert {*ACT2FN} >= config_values.ACTIVATIONS and {*ALLOWED_LAYER_TYPES} >= config_values.LAYER_TYPES
    assert config_values.ROPE_TYPES.keys() <= {*ROPE_INIT_FUNCTIONS, "default"}


def test_configs_of_samples_are_known(fixtures: Path) -> None:
    """Importing transformers takes seconds, so usual values must not need it."""
    found = {}
    for path in fixtures.rglob("config.json"):
        config = json.loads(path.read_text())
        is_usual = "model_type" in config and "olmo-core" not in path.parts  # -1 positions
        found[path] = [*unknown_values(config)] if is_usual else []
    found[Path("DeepSeek-V3")] = [*unknown_values(DEEPSEEK_V3)]
    assert len(found) > 20 and {str(path): one for path, one in found.items() if one} == {}
