"""`converters/names/hub/composites.py`: tables of models that see, against models that transformers builds and saves;
and names of earlier releases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import LossError
from converters.names.hub import composites
from converters.names.hub.proof import compare, prove
from converters.names.transformers.relation import relation
from tests.support.architectures import numbered

transformers = pytest.importorskip("transformers", minversion="5.23")

TOWER = {"hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 7}
TEXT = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 3, "head_dim": 6}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
Files = dict[str, Any]


def saved_model(folder: Path, model_type: str, **entries: Any) -> tuple[dict[str, Any], Files]:
    """The config and the tensors that `save_pretrained` writes of a tiny model."""
    config = transformers.CONFIG_MAPPING[model_type](**entries)
    numbered(getattr(transformers, composites.COMPOSITES[model_type].cls)(config)).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def shapes(files: Files) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in files.items()}


@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"multimodal_projector_bias": False}])
def test_llava(tmp_path: Path, tower: str, text: str, change: dict[str, Any]) -> None:
    inner = {"text_config": {"model_type": text, **TEXT}, "vision_config": {"model_type": tower, **TOWER}}
    config, files = saved_model(tmp_path, "llava", **inner, **change)
    found = composites.saved(config)
    assert found is not None and dict(found.required) == shapes(files)
    assert len(found.optional) == config["tie_word_embeddings"]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False}])
def test_gemma3(tmp_path: Path, head: bool, change: dict[str, Any]) -> None:
    inner = {"text_config": {"model_type": "gemma3_text", **TEXT}}
    inner |= {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": head, **TOWER}}
    config, files = saved_model(tmp_path, "gemma3", **inner, **change)
    found = composites.saved(config)
    assert found is not None and dict(found.required) == shapes(files)


#: Sizes of Qwen's towers: no two are the same, so that none is taken for another.
QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 6, "temporal_patch_size": 4, "spatial_merge_size": 3}
QWEN_TOWER |= {"in_channels": 5}
QWEN_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**QWEN_TOWER, "embed_dim": 20, "hidden_size": 24, "mlp_ratio": 3},
    "qwen2_5_vl": {**QWEN_TOWER, "hidden_size": 20, "intermediate_size": 26, "out_hidden_size": 24},
    "qwen3_vl": {
        **QWEN_TOWER,
        "hidden_size": 20,
        "intermediate_size": 26,
        "out_hidden_size": 24,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 1],
    },
}


@pytest.mark.parametrize("model_type", QWEN_TOWERS)
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_qwen(tmp_path: Path, model_type: str, change: dict[str, Any]) -> None:
    """The output layer is tied by the whole model's config, biases are the text model's."""
    bias = {"attention_bias": change["attention_bias"]} if "attention_bias" in change else {}
    inner = {"text_config": {**TEXT, **bias}, "vision_config": QWEN_TOWERS[model_type]}
    tied = {name: value for name, value in change.items() if name not in bias}
    config, files = saved_model(tmp_path, model_type, **inner, **tied)
    found = composites.saved(config)
    assert found is not None and dict(found.required) == shapes(files)
    assert len(found.optional) == config["tie_word_embeddings"]


def test_a_config_with_another_part_or_a_size_that_is_none_has_no_answer() -> None:
    text = {**TEXT, "model_type": "qwen3_vl_text"}
    vision = {**QWEN_TOWERS["qwen3_vl"], "model_type": "qwen3_vl_vision"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    assert composites.saved(config) is not None
    for part, entries, change in (
        ("vision_config", vision, {"model_type": "clip_vision_model"}),
        ("vision_config", vision, {"deepstack_visual_indexes": 3}),
        ("vision_config", vision, {"depth": 1 << 30}),
        ("text_config", text, {"hidden_size": 0}),
        ("text_config", text, {"hidden_size": "32"}),
        ("text_config", text, {"num_hidden_layers": 1 << 30}),
        ("text_config", text, {"num_key_value_heads": None}),
    ):
        assert composites.saved({**config, part: {**entries, **change}}) is None, change


def test_what_a_config_does_not_say_has_no_answer() -> None:
    """The classes have sizes of their own then, which only transformers knows."""
    vision = {"model_type": "siglip_vision_model", **TOWER}
    text = {"model_type": "gemma3_text", **TEXT}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    assert composites.saved({**config, "text_config": text, "vision_config": vision}) is not None
    for inner in (
        {"text_config": {**text, "hidden_size": None}, "vision_config": vision},
        {"text_config": text, "vision_config": {**vision, "patch_size": None}},
        {"text_config": {**text, "model_type": "llama"}, "vision_config": vision},
        {"text_config": text},
    ):
        assert composites.saved({**config, **inner}) is None
    assert composites.saved({**config, "architectures": ["Gemma3Model"]}) is None


def test_files_of_an_earlier_release_are_those_of_the_model(tmp_path: Path) -> None:
    """The Hub has Gemma 3 and LLaVA as transformers 4 saved them; they were said to load nowhere."""
    inner = {"text_config": {"model_type": "gemma3_text", **TEXT}}
    inner |= {"vision_config": {"model_type": "siglip_vision_model", **TOWER}}
    config, files = saved_model(tmp_path / "now", "gemma3", **inner)
    before = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in files.items()}
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "config.json").write_text(json.dumps(config))
    save_file(before, tmp_path / "before" / "model.safetensors", {"format": "pt"})
    _, loaded = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "before", output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source = ckpt.open(tmp_path / "before")
    assert not any("save_pretrained" in note for note in source.notes)
    done = ckpt.plan(source, "hf")
    assert any("names are those of an earlier release" in note for note in done.plan.target.notes)
    done.run(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == before.keys()

    one_wrong = {name.replace("post_layernorm", "last_layernorm"): shape for name, shape in shapes(before).items()}
    memory = relation(config, shapes(files), "to_memory")
    assert memory is not None
    for wrong in (one_wrong, memory.b_shapes):  # what a state dict has is no name of files
        with pytest.raises(LossError, match="this is not what save_pretrained of Gemma3"):
            prove(config, wrong, "x")
    saved = composites.saved(config)
    assert saved is not None and str(compare(saved, one_wrong, config)).count("last_layernorm") == 2
