"""`converters/megatron/read.py`, `converters/megatron/dist/read.py`: megatron-core's models with an encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MegatronBertConfig, MegatronBertForPreTraining

from tests.support.commands import ckpt
from tests.support.engines import fork_once

pytestmark = pytest.mark.slow

CLASS = "MegatronBertForPreTraining"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    fork_once(
        folder, [(1, "tests.formats.megatron.megatron_encoders", [str(folder)])], ["tests.support.megatron_imports"]
    )
    return folder


FORMATS = [("torch", "megatron"), ("torch_dist", "megatron-dist")]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("t5", "with an encoder and a decoder (T5Model) is not supported"),
        ("bert-one-head", "without its sentence-pair head is not supported"),
    ],
)
@pytest.mark.parametrize(("saved", "format"), FORMATS)
def test_another_model_with_an_encoder_is_refused_by_name(
    folder: Path, model: str, said: str, saved: str, format: str
) -> None:
    done = ckpt("convert", format, "hf", folder / model / saved, "-o", folder / "no")
    assert done.code == 3, done.err
    assert said in done.err
    assert "tensor: encoder." in done.err


@pytest.mark.parametrize(("saved", "format"), FORMATS)
def test_transformers_loads_what_bertmodel_saved(folder: Path, saved: str, format: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MegatronBertConfig(**sizes, intermediate_size=64, max_position_embeddings=8, architectures=[CLASS])
    config.save_pretrained(tmp_path)
    given = ("--config", tmp_path / "config.json")
    done = ckpt("convert", format, "hf", folder / "bert" / saved, "-o", tmp_path / "hf", *given)
    assert done.code == 0, done.err
    model, said = MegatronBertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(said.values()), said
    held = torch.load(next((folder / "bert/torch").rglob("*.pt")), weights_only=False)["model"]
    assert torch.equal(model.bert.encoder.ln.weight, held["encoder.final_layernorm.weight"])
    assert torch.equal(
        model.bert.embeddings.token_type_embeddings.weight, held["embedding.tokentype_embeddings.weight"]
    )
    assert torch.equal(model.cls.predictions.decoder.weight, held["embedding.word_embeddings.weight"][:30])
    assert torch.equal(model.bert.encoder.layer[1].ln.weight, held["encoder.layers.1.pre_mlp_layernorm.weight"])
    fused = held["encoder.layers.1.self_attention.linear_qkv.weight"].reshape(4, 3, 4, 16)
    assert torch.equal(model.bert.encoder.layer[1].attention.self.key.weight, fused[:, 1].reshape(16, 16))
    assert torch.equal(model.cls.seq_relationship.weight, held["binary_head.weight"])


@pytest.mark.parametrize("form", ["torch_dcp", "fsdp_dtensor"])
def test_other_forms_of_bertmodel_are_refused(folder: Path, form: str, tmp_path: Path) -> None:
    given = ("--ckpt-format", form, "-o", tmp_path / "out")
    done = ckpt("convert", "megatron", "megatron-dist", folder / "bert/torch", *given)
    assert done.code == 6, done.err
    assert f"{form} can't hold a BertModel" in done.err


def test_biases_by_relative_position_need_transformer_engine(folder: Path) -> None:
    """Without it, a T5 bias table can't be tested here."""
    assert "Attention bias is not supported" in (folder / "relative").read_text()
