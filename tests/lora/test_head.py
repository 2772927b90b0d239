"""`ckpt/commands/merge_lora/head.py`, `converters/names/hub/classes.py`: adapters for reward models and classifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import BF16, differing, edited, perturb, same, weights
from tests.support.commands import ckpt

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
#: By name: model type, other config entries, base class, trained class, and PEFT's options.
TRAINED: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "a reward model": ("llama", {}, "LlamaForCausalLM", "LlamaForSequenceClassification", {"task_type": "SEQ_CLS"}),
    "a tied base": (
        "qwen2",
        {"tie_word_embeddings": True},
        "Qwen2ForCausalLM",
        "Qwen2ForTokenClassification",
        {"task_type": "TOKEN_CLS"},
    ),
    "experts": (
        "mixtral",
        {"num_local_experts": 2, "num_key_value_heads": 2},
        "MixtralForCausalLM",
        "MixtralForSequenceClassification",
        {"task_type": "SEQ_CLS"},
    ),
    "answers": (
        "distilbert",
        {"dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4},
        "DistilBertForMaskedLM",
        "DistilBertForQuestionAnswering",
        {"task_type": "QUESTION_ANS", "target_modules": ["q_lin"]},
    ),
    "Conv1D": (
        "gpt2",
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32},
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification",
        {"task_type": "SEQ_CLS", "target_modules": ["c_attn"]},
    ),
    "a base without the path of the inner model": (
        "bert",
        {},
        "BertModel",
        "BertForSequenceClassification",
        {"task_type": "SEQ_CLS", "target_modules": ["query"]},
    ),
    "a head of two layers": (
        "roberta",
        {},
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        {"task_type": "SEQ_CLS", "target_modules": ["query"]},
    ),
    "a class that is recorded by name": (
        "vit",
        {"image_size": 16, "patch_size": 8},
        "ViTModel",
        "ViTForImageClassification",
        {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]},
    ),
    "an encoder of texts": (
        "mistral",
        {"num_key_value_heads": 2},
        "MistralForCausalLM",
        "MistralModel",
        {"task_type": "FEATURE_EXTRACTION"},
    ),
}


def make(
    folder: Path, model_type: str, more: Mapping[str, Any], base: str, trained: str, options: Mapping[str, Any]
) -> None:
    """Save a base, an adapter of another class with three labels, and PEFT's merge of both."""
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, "pad_token_id": 0, **more})
    getattr(transformers, base)(config).to(BF16).save_pretrained(folder / "base")
    labels = {} if "QuestionAnswering" in trained or trained.endswith("Model") else {"num_labels": 3}
    model = getattr(transformers, trained).from_pretrained(folder / "base", dtype=BF16, **labels)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options}))
    perturb(wrapped)
    wrapped.save_pretrained(folder / "adapter")
    wrapped.merge_and_unload().save_pretrained(folder / "truth")


@pytest.mark.parametrize("name", TRAINED)
def test_the_class_that_was_trained_is_built(name: str, tmp_path: Path) -> None:
    make(tmp_path, *TRAINED[name])
    base, truth, out = tmp_path / "base", tmp_path / "truth", tmp_path / "out"
    done = ckpt("merge-lora", tmp_path / "adapter", "--base", base, "-o", out)
    trained = TRAINED[name][3]
    assert done.code == 0 and f"the model is {trained}, as the adapter records" in done.err, done.err
    theirs, ours = weights(truth), weights(out)
    assert differing(theirs, ours) == []
    configs = [json.loads((folder / "config.json").read_text()) for folder in (truth, out)]
    for entry in ("architectures", "id2label", "label2id"):
        assert configs[0].get(entry) == configs[1].get(entry), entry
    verified = ckpt("verify", base, truth, "--adapter", tmp_path / "adapter")
    assert verified.code == 0, verified.out + verified.err
    assert ckpt("verify", base, base, "--adapter", tmp_path / "adapter").code == 1


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    make(folder, *TRAINED["a reward model"])
    return folder


def test_a_merged_classifier_has_the_logits_of_pefts(reward: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    assert ckpt("merge-lora", reward / "adapter", "--base", reward / "base", "-o", tmp_path / "out").code == 0
    ids = torch.randint(1, 64, (2, 6))
    ours, theirs = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=BF16).eval()(ids).logits
        for folder in (tmp_path / "out", reward / "truth")
    )
    assert ours.shape == (2, 3) and torch.equal(ours, theirs)


def test_labels_are_taken_from_the_config_beside_the_adapter(reward: Path, tmp_path: Path) -> None:
    adapter = edited(reward / "adapter", tmp_path / "adapter")
    names = {"0": "bad", "1": "fair", "2": "good"}
    config = json.loads((reward / "base" / "config.json").read_text())
    config |= {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}, "pad_token_id": 5}
    (adapter / "config.json").write_text(json.dumps(config))
    assert ckpt("merge-lora", adapter, "--base", reward / "base", "-o", tmp_path / "out").code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["id2label"], written["pad_token_id"]) == (names, 5)


def test_a_base_that_has_the_head_already(reward: Path, tmp_path: Path) -> None:
    """The adapter's head replaces the base's head."""
    out = tmp_path / "out"
    assert ckpt("merge-lora", reward / "adapter", "--base", reward / "truth", "-o", out).code == 0
    assert same(weights(out)["score.weight"], weights(reward / "truth")["score.weight"])


def without_head(reward: Path, folder: Path) -> Path:
    adapter = edited(reward / "adapter", folder)
    file = adapter / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not name.endswith("score.weight")}, file)
    return adapter


def test_a_head_that_was_not_saved_is_refused(reward: Path, tmp_path: Path) -> None:
    adapter = without_head(reward, tmp_path / "adapter")
    refused = ckpt("merge-lora", adapter, "--base", reward / "base", "-o", tmp_path / "out")
    assert refused.code == 6 and "tensor: score.weight" in refused.err
    assert "give the LlamaForSequenceClassification from training with --base" in refused.err


def test_a_layer_that_was_drawn_at_random_is_missed_or_taken(tmp_path: Path) -> None:
    """PEFT saves DeBERTa's pooler only on request, and no base has one."""
    deberta = ("deberta-v2", {}, "DebertaV2ForMaskedLM", "DebertaV2ForSequenceClassification")
    for saved in (None, ["pooler", "classifier"]):
        folder = tmp_path / ("whole" if saved else "part")
        make(folder, *deberta, {"task_type": "SEQ_CLS", "target_modules": ["query_proj"], "modules_to_save": saved})
        done = ckpt("merge-lora", folder / "adapter", "--base", folder / "base", "-o", folder / "out")
        assert done.code == (0 if saved else 6), done.err
        if saved:
            theirs, ours = weights(folder / "truth"), weights(folder / "out")
            assert differing(theirs, ours) == []
        else:
            assert "tensor: pooler.dense.bias" in done.err


def test_a_class_that_takes_nothing_of_the_base_is_refused(tmp_path: Path) -> None:
    """LlamaForQuestionAnswering names its inner model differently, so transformers initializes everything at random."""
    make(tmp_path, "llama", {}, "LlamaForCausalLM", "LlamaForQuestionAnswering", {"task_type": "QUESTION_ANS"})
    refused = ckpt("merge-lora", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "out")
    assert refused.code == 6 and "in neither the adapter nor the base" in refused.err


def test_an_adapter_of_a_causal_model_needs_no_other_class(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    done = ckpt("merge-lora", linear, "--base", bases["llama"], "-o", tmp_path / "out")
    assert done.code == 0 and "as the adapter records" not in done.err
