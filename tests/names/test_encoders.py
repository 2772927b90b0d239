"""`converters/names/families/encoders.py`: tables of encoders and encoder-decoders, against saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from converters.names.families import encoders
from converters.names.families.encoders import ENCODERS

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
NOT_COVERED = {"add_cross_attention", "share_encoder_decoder_embeddings", "conv_kernel_size", "legacy"}


def variants(model_type: str) -> list[dict[str, Any]]:
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    changes = DEBERTA if model_type == "deberta-v2" else []
    return [{}, *changes, *(change for change in CHANGES if change.keys() <= known.keys())]


def really_saved(model_type: str, cls: Any, change: dict[str, Any], folder: Path) -> tuple[dict, dict]:
    """Save a model and return its config.json and the tensor shapes by name."""
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    labels = {"num_labels": 2 if cls.__name__.endswith("ForQuestionAnswering") else 3}
    with torch.device("cpu"):
        cls(transformers.CONFIG_MAPPING[model_type](**{**sizes, **labels, **change})).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return json.loads((folder / "config.json").read_text()), shapes


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


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_every_name_in_memory_is_in_the_table(model_type: str) -> None:
    """Engines save tied tensors under several names, and tensors that transformers computes."""
    encoder = ENCODERS[model_type]
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    config = transformers.CONFIG_MAPPING[model_type](**{name: value for name, value in SIZES.items() if name in known})
    for head in encoder.heads:
        cls = getattr(transformers, encoder.stem + head)
        with torch.device("meta"):
            model = cls(config)
        found = encoders.saved({**config.to_dict(), "architectures": [cls.__name__]})
        assert found is not None
        memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert memory.items() <= {**found.optional, **found.required}.items(), cls.__name__


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_what_a_config_leaves_out_is_what_its_class_takes(model_type: str) -> None:
    encoder, made = ENCODERS[model_type], transformers.CONFIG_MAPPING[model_type]
    found = encoders.saved({"model_type": model_type, "architectures": [f"{encoder.stem}Model"]})
    with torch.device("meta"):
        model = getattr(transformers, f"{encoder.stem}Model")(made())
    assert found is not None
    memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found.required.items() <= memory.items() <= {**found.optional, **found.required}.items()
