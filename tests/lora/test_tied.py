"""`ckpt/commands/merge_lora/tied.py`, `merge.py`, `merge_proof.py`: adapters on tied weights match the live model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import differing, perturb, same, weights
from tests.support.commands import Result, ckpt
from tests.support.model_files import merge_json

IDS = torch.arange(16).reshape(2, 8)
SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
BOTH = ["embed_tokens", "lm_head"]
#: Adapter options that change only some tied layers.
DIVIDED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": BOTH},
    "DoRA, both": {"target_modules": BOTH, "use_dora": True},
    "parameter": {"target_modules": [], "target_parameters": ["lm_head.weight"]},
    "rows of the head": {"trainable_token_indices": {"lm_head": [1, 5]}},
    "other rows": {"trainable_token_indices": {"lm_head": [1, 5], "embed_tokens": [2, 5]}},
    "rows and LoRA": {"trainable_token_indices": [1, 5], "target_modules": ["lm_head"]},
    "copy of the embedding": {"modules_to_save": ["embed_tokens"]},
    "copy of the head": {"modules_to_save": ["lm_head"]},
    "copy and LoRA": {"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head"]},
    "PiSSA": {"target_modules": ["lm_head"], "init_lora_weights": "pissa"},
    "OLoRA": {"target_modules": ["lm_head"], "init_lora_weights": "olora"},
}
#: Adapter options that keep the tied weights equal.
TIED: dict[str, dict[str, Any]] = {
    "rows": {"trainable_token_indices": [1, 5]},
    "LoRA, kept tied": {"target_modules": ["lm_head"], "ensure_weight_tying": True},
    "LoRA of the embedding, kept tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "copies, kept tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "another layer": {},
}


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True))


def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 20))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=24, d_model=16, max_position_embeddings=32, **sizes, **heads)
    config.eos_token_id = config.forced_eos_token_id = 2
    return BartForConditionalGeneration(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=24, d_model=16, d_ff=20, num_layers=1, num_heads=2, d_kv=8))


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 1}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))


def logits(model: Any) -> torch.Tensor:
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(input_ids=IDS, **given).logits
    return computed


def save_base(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def train(base: Path, folder: Path, config: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Save a random adapter with PEFT. Return the live model's logits and the model."""
    from peft import get_peft_model

    live = get_peft_model(type(model).from_pretrained(base), config)
    perturb(live, 1)
    live.save_pretrained(folder)
    return logits(live), live


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})


def merge(folder: Path, *more: str) -> Result:
    return ckpt("merge-lora", folder / "adapter", "--base", folder / "base", "-o", folder / "out", *more)


def verify(folder: Path, merged: str = "out") -> Result:
    return ckpt("verify", folder / "base", folder / merged, "--adapter", folder / "adapter")


def check_is_as_trained(folder: Path, live: torch.Tensor, model: Any) -> None:
    done = merge(folder)
    assert done.code == 0, done.err
    assert "target_modules does not name" not in done.err
    found = logits(type(model).from_pretrained(folder / "out"))
    before = logits(type(model).from_pretrained(folder / "base"))
    assert float((found - live).abs().max()) < 1e-4 < float((before - live).abs().max())
    assert ckpt("verify", "--loads", folder / "out").code == 0
    proved = verify(folder)
    assert proved.code == 0, proved.out


def test_weights_that_are_no_longer_equal_are_both_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2()
    base = save_base(model, tmp_path / "base")
    failed = []
    for name, options in DIVIDED.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base").symlink_to(base)
        live, _ = train(base, folder / "adapter", lora(**options), model)
        check_is_as_trained(folder, live, model)
        if json.loads((folder / "out" / "config.json").read_text())["tie_word_embeddings"]:
            failed.append(name)
        if not {"model.embed_tokens.weight", "lm_head.weight"} <= weights(folder / "out").keys():
            failed.append(name)
    assert failed == []


def test_weights_that_stay_equal_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2()
    base = save_base(model, tmp_path / "base")
    for name, options in TIED.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base").symlink_to(base)
        live, _ = train(base, folder / "adapter", lora(**options), model)
        check_is_as_trained(folder, live, model)
        has_two = "LoRA" in name
        assert (_ONCE in merge(folder, "--overwrite").err) == has_two, name
        assert json.loads((folder / "out" / "config.json").read_text())["tie_word_embeddings"], name
        assert "lm_head.weight" not in weights(folder / "out")


def test_a_base_that_stores_different_weights_under_a_tie(tmp_path: Path) -> None:
    """PEFT follows the config and ties the rows. transformers 5 loads both as they are."""
    torch.manual_seed(0)
    model = qwen2()
    base = save_base(model, tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    head = torch.randn_like(stored["model.embed_tokens.weight"])
    save_file({**stored, "lm_head.weight": head}, base / "model.safetensors", {"format": "pt"})
    for name in ("rows", "rows of the head", "other rows", "head", "copy of the embedding", "another layer"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base").symlink_to(base)
        live, _ = train(base, folder / "adapter", lora(**(DIVIDED | TIED)[name]), model)
        check_is_as_trained(folder, live, model)


def test_as_peft_has_the_bits_of_its_merge_and_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2()
    save_base(model, tmp_path / "base")
    _, live = train(tmp_path / "base", tmp_path / "adapter", lora(target_modules=["lm_head"]), model)
    live.merge_and_unload().save_pretrained(tmp_path / "peft")
    trained = merge(tmp_path)
    assert "lm_head of" in trained.err and "as trained" in trained.err and "--as-peft" in trained.err
    (tmp_path / "out").rename(tmp_path / "trained")
    done = merge(tmp_path, "--as-peft")
    assert "not the trained model" in done.err and "as trained," not in done.err
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "peft")
    assert differing(ours, theirs) == []
    for merged, words in (("trained", "as trained,"), ("out", "not the trained"), ("peft", "not the trained")):
        proved = verify(tmp_path, merged)
        assert proved.code == 0 and words in proved.out
    config = tmp_path / "trained" / "config.json"
    merge_json(config, {"tie_word_embeddings": True})
    refused = verify(tmp_path, "trained")
    assert refused.code == 1 and "lm_head.weight" in refused.out and "config.json ties it" in refused.out
    merge_json(tmp_path / "peft" / "config.json", {"tie_word_embeddings": False})
    refused = verify(tmp_path, "peft")
    assert refused.code == 1 and "lm_head.weight" in refused.out and "does not tie it" in refused.out


def test_an_init_that_changes_the_base_of_one_tied_layer_needs_that_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2()
    save_base(model, tmp_path / "base")
    train(tmp_path / "base", tmp_path / "adapter", lora(**DIVIDED["PiSSA"]), model)
    assert merge(tmp_path).code == 0
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if "lora_" in name}, file, {"format": "pt"})
    refused = merge(tmp_path, "--overwrite")
    assert refused.code == 2 and "unadapted layer" in refused.err and "hint: --as-peft" in refused.err, refused.err


#: Note about tied layers with one change.
_ONCE = "as trained, their tied weight changes once"


def test_one_change_of_tied_layers_is_added_once(tmp_path: Path) -> None:
    """PEFT trains one change for both layers, but its merge adds the change for each layer to the shared weight."""
    torch.manual_seed(0)
    model = qwen2()
    save_base(model, tmp_path / "base")
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "lora_alpha": 32}
    trained, live = train(tmp_path / "base", tmp_path / "adapter", lora(**options), model)
    done = merge(tmp_path)
    assert f"lm_head and model.embed_tokens of {tmp_path / 'adapter'}: {_ONCE}" in done.err
    peft = live.merge_and_unload()
    peft.save_pretrained(tmp_path / "peft")
    ours = logits(type(model).from_pretrained(tmp_path / "out"))
    assert float((ours - trained).abs().max()) < 1e-4 < float((logits(peft) - trained).abs().max())
    (tmp_path / "out").rename(tmp_path / "trained")
    done = merge(tmp_path, "--as-peft")
    assert _ONCE not in done.err and "the result is not the trained model" in done.err
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "peft")
    assert all(same(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())


def test_peft_adds_all_changes_of_a_replicated_layer_to_its_one_weight(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    save_base(model, tmp_path / "base")
    trained, live = train(tmp_path / "base", tmp_path / "adapter", lora(layer_replication=[[0, 1], [0, 1]]), model)
    layers = [layer.self_attn.q_proj for layer in live.model.model.layers]
    added = sum(layer.get_delta_weight("default") for layer in layers)
    before = load_file(tmp_path / "base" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    sentence = "PEFT adds every copy's changes to one shared layer"
    refused = merge(tmp_path)
    assert (refused.code, (tmp_path / "out").exists()) == (2, False)
    assert sentence in refused.err
    peft = live.merge_and_unload()
    shared = [layer.self_attn.q_proj.weight for layer in peft.model.layers]
    assert len(shared) == 2 and all(torch.allclose(one, before + added, atol=1e-6) for one in shared)
    assert float((logits(peft) - trained).abs().max()) > 1e-4
    merge_json(tmp_path / "adapter" / "adapter_config.json", {"layer_replication": None})
    assert sentence not in merge(tmp_path).err


def test_other_methods_change_their_layer_alone(tmp_path: Path) -> None:
    from peft import LoHaConfig, TrainableTokensConfig, VeraConfig

    torch.manual_seed(0)
    model = qwen2()
    base = save_base(model, tmp_path / "base")
    configs = [LoHaConfig(target_modules=["lm_head"], r=2), VeraConfig(target_modules=["lm_head"], r=2)]
    configs += [TrainableTokensConfig(token_indices=[1, 5], target_modules=one) for one in (["lm_head"], None)]
    for number, config in enumerate(configs):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "base").symlink_to(base)
        live, _ = train(base, folder / "adapter", config, model)
        check_is_as_trained(folder, live, model)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_one_adapter_after_the_other(stored_twice: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qwen2()
    base = save_base(model, tmp_path / "base")
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    if stored_twice:
        file = base / "model.safetensors"
        save_file(load_file(file) | {"lm_head.weight": before.clone()}, file, metadata={"format": "pt"})
    for name, options in (("rows", {"trainable_token_indices": [1, 5]}), ("head", {"target_modules": ["lm_head"]})):
        train(base, tmp_path / name, lora(**options), model)
    given = [tmp_path / "rows", tmp_path / "head"]
    done = ckpt("merge-lora", *given, "--base", base, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    rows = load_file(tmp_path / "rows" / "adapter_model.safetensors")
    factors = load_file(tmp_path / "head" / "adapter_model.safetensors")
    expected = before.index_copy(0, torch.tensor([1, 5]), next(t for n, t in rows.items() if "token_adapter" in n))
    head = "base_model.model.lm_head.lora_"
    merged = weights(tmp_path / "out")
    assert torch.equal(merged["model.embed_tokens.weight"], expected)
    added = 4 * factors[f"{head}B.weight"] @ factors[f"{head}A.weight"]  # alpha 8, rank 2
    assert torch.allclose(merged["lm_head.weight"], expected + added, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("target", ["lm_head", "encoder.embed_tokens", "decoder.embed_tokens", "embed_tokens"])
def test_ties_of_an_encoder_and_a_decoder(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bart()
    save_base(model, tmp_path / "base")
    live, _ = train(tmp_path / "base", tmp_path / "adapter", lora(target_modules=[target]), model)
    check_is_as_trained(tmp_path, live, model)


def test_the_ties_of_a_text_model_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gemma3()
    save_base(model, tmp_path / "base")
    live, _ = train(tmp_path / "base", tmp_path / "adapter", lora(target_modules=["lm_head"]), model)
    check_is_as_trained(tmp_path, live, model)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)


def test_a_model_that_computes_otherwise_untied_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = t5()
    save_base(model, tmp_path / "base")
    _, live = train(tmp_path / "base", tmp_path / "adapter", lora(target_modules=["q", "lm_head"]), model)
    refused = merge(tmp_path)
    assert (refused.code, (tmp_path / "out").exists()) == (6, False)
    assert "--as-peft" in refused.err
    assert merge(tmp_path, "--as-peft").code == 0
    live.merge_and_unload().save_pretrained(tmp_path / "peft")
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "peft")
    assert differing(ours, theirs) == []
    proved = verify(tmp_path)
    assert proved.code == 0 and "not the trained model" in proved.out
