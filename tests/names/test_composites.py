"""`converters/names/families/composites.py`: tables for models with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import LossError
from converters.names.families import composites
from converters.names.families.composites import COMPOSITES
from converters.names.hub.proof import compare, prove
from converters.names.transformers.order import as_registered
from converters.names.transformers.relation import relation
from tests.support.architectures import numbered
from tests.support.loaded import save_loaded

transformers = pytest.importorskip("transformers", minversion="5.23")

TOWER = {"hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 7}
TEXT = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 3, "head_dim": 6}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
Files = dict[str, Any]


def saved_model(folder: Path, model_type: str, **entries: Any) -> tuple[dict[str, Any], Files]:
    """Return config and tensors written by `save_pretrained` for a tiny model."""
    config = transformers.CONFIG_MAPPING[model_type](**entries)
    save_loaded(numbered(getattr(transformers, composites.COMPOSITES[model_type].cls)(config)), folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def shapes(files: Files) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in files.items()}


def check_saved(folder: Path, model_type: str, **entries: Any) -> None:
    config, files = saved_model(folder, model_type, **entries)
    found = composites.saved(config)
    assert found is not None and dict(found.required) == shapes(files)
    assert len(found.optional) == config["tie_word_embeddings"]


@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model", "pixtral"])
@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"multimodal_projector_bias": False}])
def test_llava(tmp_path: Path, tower: str, text: str, change: dict[str, Any]) -> None:
    inner = {"text_config": {"model_type": text, **TEXT}, "vision_config": {"model_type": tower, **TOWER}}
    check_saved(tmp_path, "llava", **inner, **change)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False}])
def test_gemma3(tmp_path: Path, head: bool, change: dict[str, Any]) -> None:
    inner = {"text_config": {"model_type": "gemma3_text", **TEXT}}
    inner |= {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": head, **TOWER}}
    check_saved(tmp_path, "gemma3", **inner, **change)


#: Sizes of Qwen's towers. All differ, so that a mix-up shows.
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
    """The whole model's config ties the output layer, and the text model's config sets biases."""
    bias = {"attention_bias": change["attention_bias"]} if "attention_bias" in change else {}
    inner = {"text_config": {**TEXT, **bias}, "vision_config": QWEN_TOWERS[model_type]}
    tied = {name: value for name, value in change.items() if name not in bias}
    check_saved(tmp_path, model_type, **inner, **tied)


_PATCHED = {"depth": 2, "num_heads": 2, "patch_size": 7, "temporal_patch_size": 2, "spatial_merge_size": 2}
GLM_TOWER = {**_PATCHED, "hidden_size": 20, "intermediate_size": 26, "out_hidden_size": 24, "image_size": 28}
EXPERTS = {"moe_intermediate_size": 11, "num_experts_per_tok": 2, "num_experts": 5, "num_local_experts": 5}
GLM_EXPERTS = {**EXPERTS, "n_routed_experts": 5, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
#: By name: model type, text model, vision tower, and other entries in the whole config.
LATER: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava_next": ("llava_next", {"model_type": "mistral"}, {"model_type": "clip_vision_model", **TOWER}, {}),
    "llava_onevision": (
        "llava_onevision",
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        {"tie_word_embeddings": True},
    ),
    "internvl": ("internvl", {"model_type": "qwen2"}, {"attention_bias": True, **TOWER}, {}),
    "internvl-norms": (
        "internvl",
        {"model_type": "qwen3_moe", **EXPERTS},
        {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False, "use_mask_token": True, **TOWER},
        {"tie_word_embeddings": False},
    ),
    "mistral3": ("mistral3", {"model_type": "mistral"}, {"model_type": "pixtral", **TOWER}, {}),
    "mistral3-biases": (
        "mistral3",
        {"model_type": "ministral3"},
        {"model_type": "pixtral", **TOWER},
        {"multimodal_projector_bias": True, "spatial_merge_size": 1, "tie_word_embeddings": False},
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", EXPERTS, QWEN_TOWERS["qwen3_vl"], {}),
    "glm4v_moe": ("glm4v_moe", {**GLM_EXPERTS, "first_k_dense_replace": 1}, GLM_TOWER, {}),
    "glm4v_moe-biases": ("glm4v_moe", GLM_EXPERTS, {**GLM_TOWER, "attention_bias": True}, {}),
}


@pytest.mark.parametrize("case", LATER)
def test_later_ones(tmp_path: Path, case: str) -> None:
    model_type, text, vision, more = LATER[case]
    inner = {"text_config": {**TEXT, **text}, "vision_config": vision}
    check_saved(tmp_path, model_type, **inner, **more)


@pytest.mark.parametrize("case", [*LATER, *QWEN_TOWERS, "llava-clip", "llava-siglip"])
def test_the_order_of_rows_is_that_of_the_modules(case: str) -> None:
    """An optimizer knows parameters only by order."""
    towers = {"llava-clip": "clip_vision_model", "llava-siglip": "siglip_vision_model"}
    if case in towers:
        model_type, text, vision = "llava", {"model_type": "llama"}, {"model_type": towers[case], **TOWER}
    else:
        model_type, text, vision, _ = LATER.get(case, (case, {}, QWEN_TOWERS.get(case, {}), {}))
    made = transformers.CONFIG_MAPPING[model_type](text_config={**TEXT, **text}, vision_config=vision)
    with torch.device("meta"):
        names = [name for name, _ in getattr(transformers, COMPOSITES[model_type].cls)(made).named_parameters()]
    assert as_registered(sorted(names), model_type) == names
    rows = dict(COMPOSITES[model_type].sizes(json.loads(json.dumps(made.to_dict()))).top)
    seen = [COMPOSITES[model_type].current(name) for name in names if "language_model" not in name]
    assert [name for name in rows if name in seen] == [name for name in seen if name in rows]
    assert len(seen) > 20


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
    """Without these entries the classes use their own sizes, known only to transformers."""
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


def test_files_of_another_release_are_those_of_the_model(tmp_path: Path) -> None:
    """Files from transformers 5.6 or later omit `vision_model.` if the model was built from a config."""
    inner = {"text_config": {"model_type": "gemma3_text", **TEXT}}
    inner |= {"vision_config": {"model_type": "siglip_vision_model", **TOWER}}
    config, files = saved_model(tmp_path / "now", "gemma3", **inner)
    before = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in files.items()}
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
    assert any("names match another release" in note for note in done.plan.target.notes)
    done.run(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == before.keys()

    one_wrong = {name.replace("post_layernorm", "last_layernorm"): shape for name, shape in shapes(before).items()}
    memory = relation(config, shapes(files), "to_memory")
    assert memory is not None
    for wrong in (one_wrong, memory.b_shapes):  # state dict names are not file names
        with pytest.raises(LossError, match="names or shapes don't match Gemma3"):
            prove(config, wrong, "x")
    saved = composites.saved(config)
    assert saved is not None and str(compare(saved, one_wrong, config)).count("last_layernorm") == 2
