"""`converters/names/families/encoders.py` and `media.py`: tables of encoders, against saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from converters.names.families import encoders
from converters.names.families.encoders import ENCODERS
from converters.names.transformers.tables import declared

transformers = pytest.importorskip("transformers", minversion="5")

#: All sizes differ, so that a mix-up shows. Each applies if the config class has the entry.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim"), 36),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim"), 44),
    "decoder_ffn_dim": 46,
    "vocab_size": 67,
    "decoder_vocab_size": None,
    "max_position_embeddings": 71,
    "type_vocab_size": 5,
    "embedding_size": 13,
    "d_kv": 9,
    "relative_attention_num_buckets": 17,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "decoder_start_token_id": 3,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 3,
    "classifier_proj_size": 14,
    "conv_dim": [6, 10],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_codevectors_per_group": 7,
    "codevector_dim": 16,
    "proj_codevector_dim": 18,
}
_PART = {"intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXTS = {**_PART, "hidden_size": 24, "vocab_size": 67, "max_position_embeddings": 71}
_IMAGES = {**_PART, "hidden_size": 36, "num_channels": 3, "image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
#: Sizes of one model type.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "swin": {
        "embed_dim": 12,
        "num_layers": 3,
        "depths": [1, 2, 1],
        "num_heads": [2, 3, 2],
        "window_size": 2,
        "patch_size": 4,
    },
    "convnext": {"hidden_sizes": [6, 10, 12], "depths": [1, 2, 1], "num_stages": 3},
    "clip": {"text_config": _TEXTS, "vision_config": _IMAGES, "projection_dim": 20},
    "siglip": {"text_config": {**_TEXTS, "projection_size": 36}, "vision_config": _IMAGES},
}
#: Other entries that change the tensors, each tried alone if the class has the entry.
CHANGES: list[dict[str, Any]] = [
    {"tie_word_embeddings": False},
    {"embedding_size": 36},
    {"feed_forward_proj": "relu"},
    {"feed_forward_proj": "gated-gelu"},
    *({name: True} for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")),
    {"is_decoder": True, "add_cross_attention": True},
    {"decoder_bias": False},
    {"share_encoder_decoder_embeddings": False},
    {"qkv_bias": False},
    {"use_mask_token": False},
    {"use_swiglu_ffn": True},
    {"pooler_output_size": 9},
    {"use_absolute_embeddings": True},
    {"layer_scale_init_value": 0.0},
    {"num_stages": 2},
    {"conv_bias": True},
    {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
    {"mask_time_prob": 0.0},
    {"use_weighted_layer_sum": True},
    {"adapter_attn_dim": 4},
    {"conv_pos_batch_norm": True},
    {"feat_proj_layer_norm": False},
]
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
DEBERTA = [
    DEBERTA_V3,
    {**DEBERTA_V3, "position_buckets": -1, "norm_rel_ebd": "none", "pooler_hidden_size": 40},
    {**DEBERTA_V3, "max_relative_positions": 9, "position_buckets": -1},
    {**DEBERTA_V3, "share_att_key": False},
    {"conv_kernel_size": 3},
    {"legacy": False},
]
#: Configs without a table: (model type, change).
NOT_COVERED = {
    *("add_cross_attention", "share_encoder_decoder_embeddings", "conv_kernel_size", "legacy"),
    *("use_swiglu_ffn", "adapter_attn_dim", "conv_pos_batch_norm"),
}
NO_HEAD = {"vision_config": {**_IMAGES, "vision_use_head": False}}


def variants(model_type: str) -> list[dict[str, Any]]:
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    changes = {"deberta-v2": DEBERTA, "siglip": [NO_HEAD]}.get(model_type, [])
    return [{}, *changes, *(change for change in CHANGES if change.keys() <= known.keys())]


def made(model_type: str, **entries: Any) -> Any:
    cls = transformers.CONFIG_MAPPING[model_type]
    known = cls().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return cls(**{**sizes, **OWN_SIZES.get(model_type, {}), **entries})


def really_saved(model_type: str, cls: Any, change: dict[str, Any], folder: Path) -> tuple[dict, dict]:
    """Save a model and return its config.json and the tensor shapes by name."""
    labels = {"num_labels": 2 if cls.__name__.endswith("ForQuestionAnswering") else 3}
    with torch.device("cpu"):
        cls(made(model_type, **labels, **change)).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return json.loads((folder / "config.json").read_text()), shapes


def hub_names(config: Any, model: Any) -> dict[str, tuple[int, ...]]:
    """Return a model's shapes in memory under the names in files."""
    memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rules = declared({**config.to_dict(), "architectures": [type(model).__name__]})
    relation = rules and rules.relation(memory, "to_hub")
    return dict(relation.b_shapes) if relation else memory


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_a_table_says_what_is_really_saved(tmp_path: Path, model_type: str) -> None:
    encoder = ENCODERS[model_type]
    for number, change in enumerate(variants(model_type)):
        for head in encoder.heads:
            cls = getattr(transformers, encoder.stem + head)
            config, truth = really_saved(model_type, cls, change, tmp_path / f"{number}{head}")
            found = encoders.saved(config)
            if NOT_COVERED & change.keys() or change.get("share_att_key") is False:
                assert found is None, (change, cls.__name__)
                continue
            assert found is not None
            assert dict(found.required) == truth, (change, cls.__name__)


@pytest.mark.parametrize("change", [{"num_stages": 4}, {"depths": [1, 2]}])
def test_a_config_without_the_sizes_of_its_stages_has_no_table(change: dict[str, Any]) -> None:
    """Not even transformers 5.23 can build a model from it."""
    config = made("convnext", **change)
    with pytest.raises(IndexError):
        transformers.ConvNextModel(config)
    assert encoders.saved({**config.to_dict(), "architectures": ["ConvNextModel"]}) is None


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_every_name_in_memory_is_in_the_table(model_type: str) -> None:
    """Engines save tied tensors under several names, and tensors that transformers computes."""
    encoder = ENCODERS[model_type]
    config = made(model_type)
    for head in encoder.heads:
        cls = getattr(transformers, encoder.stem + head)
        with torch.device("meta"):
            model = cls(config)
        found = encoders.saved({**config.to_dict(), "architectures": [cls.__name__]})
        assert found is not None
        memory = hub_names(config, model)
        assert memory.items() <= {**found.optional, **found.required}.items(), cls.__name__


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_what_a_config_leaves_out_is_what_its_class_takes(model_type: str) -> None:
    encoder, config = ENCODERS[model_type], transformers.CONFIG_MAPPING[model_type]()
    found = encoders.saved({"model_type": model_type, "architectures": [f"{encoder.stem}Model"]})
    with torch.device("meta"):
        model = getattr(transformers, f"{encoder.stem}Model")(config)
    assert found is not None
    memory = hub_names(config, model)
    assert found.required.items() <= memory.items() <= {**found.optional, **found.required}.items()
