"""`ckpt/commands/merge_lora/unmerged_files.py`, `converters/huggingface/peft.py`: trained weights next to an adapter.

A merge includes them or refuses them by file name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import differing, same, weights
from tests.support.commands import ckpt

HEAD = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}
EMBEDDINGS = {"model.embed_tokens.weight": torch.ones(7, 32)}
LAYER = {"score.weight": torch.ones(1, 32)}
FACTORS = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(3, 32)}

#: Files with trained weights missing from PEFT's file, by trainer or user habit.
TRAINED: dict[str, tuple[str, Mapping[str, torch.Tensor]]] = {
    "LLaMA-Factory": ("value_head.safetensors", HEAD),
    "LLaMA-Factory before": ("value_head.bin", HEAD),
    "TRL": ("pytorch_model.bin", HEAD),
    "LLaVA before tuning": ("mm_projector.bin", {"model.mm_projector.0.weight": torch.ones(4, 4)}),
    "new embeddings": ("new_embeddings.safetensors", EMBEDDINGS),
    "a classifier": ("classifier_head.pt", LAYER),
    "without names that say more": ("extra.bin", EMBEDDINGS | LAYER),
}


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path)
    else:
        torch.save(dict(tensors), path)


@pytest.fixture
def adapter(linear: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(linear, tmp_path / "adapter"))


@pytest.mark.parametrize("trainer", TRAINED)
def test_a_neighbour_with_trained_weights_is_refused_unless_ignored(
    trainer: str, adapter: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    (name, tensors), base, out = TRAINED[trainer], bases["llama"], tmp_path / "out"
    save(adapter / name, tensors)
    merge = ("merge-lora", adapter, "--base", base, "-o", out)
    refused = ckpt(*merge)
    assert refused.code == 6 and not out.exists()
    assert f"file: {adapter / name}" in refused.err and next(iter(tensors)) in refused.err
    hint = f"--ignore-file {name}"
    assert hint in refused.err
    done = ckpt(*merge, *hint.split())
    assert done.code == 0 and f"not read: {adapter / name}: " in done.err
    verify = ("verify", base, out, "--adapter", adapter)
    assert ckpt(*verify).code == 6
    verified = ckpt(*verify, *hint.split())
    assert verified.code == 0 and f"not read: {adapter / name}: " in verified.out


def test_sentence_transformers_modules_are_not_dropped(adapter: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """SentenceTransformer.save_pretrained of a model with add_adapter (5.0): modules are trained, too."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for idx, kind in enumerate(("Pooling", "Dense", "Dense"), 1):
        place = f"{idx}_{kind}"
        modules.append({"idx": idx, "name": str(idx), "path": place, "type": f"sentence_transformers.models.{kind}"})
        (adapter / place).mkdir()
        if kind == "Dense":
            save(adapter / place / "model.safetensors", {"linear.weight": torch.full((4, 4), float(idx))})
    (adapter / "modules.json").write_text(json.dumps(modules))
    base = Path(shutil.copytree(bases["llama"], tmp_path / "base"))
    merge = ("merge-lora", adapter, "--base", base, "-o", tmp_path / "out")
    refused = ckpt(*merge)
    hint = "--ignore-file 2_Dense --ignore-file 3_Dense"
    assert refused.code == 6 and hint in refused.err and not (tmp_path / "out").exists()
    done = ckpt(*merge, *hint.split())
    assert done.code == 0 and f"not read: {adapter / '2_Dense'}/" in done.err
    assert "2_Dense: not read: a module of sentence-transformers" in ckpt("check", adapter).out
    shutil.copy(adapter / "modules.json", base)
    for place in ("1_Pooling", "2_Dense", "3_Dense"):
        shutil.copytree(adapter / place, base / place)
    assert ckpt(*merge, "--overwrite").code == 0
    dense = load_file(tmp_path / "out/2_Dense/model.safetensors")
    assert torch.equal(dense["linear.weight"], torch.full((4, 4), 2.0))


def test_settings_of_modules_without_weights_are_carried(adapter: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": idx, "name": str(idx), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for idx, (place, kind) in enumerate(kinds.items())
    ]
    files = {"modules.json": json.dumps(modules), "1_Pooling/config.json": "{}", "sentence_bert_config.json": "{}"}
    (adapter / "1_Pooling").mkdir()
    for name, content in files.items():
        (adapter / name).write_text(content)
    done = ckpt("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out", "-v")
    assert done.code == 0 and "modules come from the adapter" in done.err
    assert all((tmp_path / "out" / name).read_text() == content for name, content in files.items())


def test_a_neighbour_of_an_adapter_that_is_given_by_its_file(
    adapter: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    save(adapter / "value_head.safetensors", HEAD)
    file = adapter / "adapter_model.safetensors"
    assert "value_head.safetensors" in ckpt("inspect", file).out
    assert ckpt("merge-lora", file, "--base", bases["llama"], "-o", tmp_path / "out").code == 6


def test_a_neighbour_of_the_second_of_two_adapters(adapter: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    save(other / "value_head.bin", HEAD)
    merge = ("merge-lora", adapter, other, "--base", bases["llama"], "-o", tmp_path / "out")
    for how in ((), ("--adapter-weights", "0.5,0.5", "--combination", "linear")):
        assert str(other / "value_head.bin") in ckpt(*merge, *how).err


def test_only_a_file_that_is_there_can_be_ignored(adapter: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    merge = ("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out")
    assert ckpt(*merge, "--ignore-file", "value_head.bin").code == 2


def test_copies_of_the_adapter_and_whole_models_are_listed(
    adapter: Path, linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT reads one of two adapter files. A merged model in the same folder is an independent model."""
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    torch.save(FACTORS, adapter / "pytorch_model_fsdp.bin")
    shutil.copy(bases["llama"] / "model.safetensors", adapter)
    (adapter / "other").mkdir()
    for file in linear.iterdir():
        shutil.copy(file, adapter / "other")
    done = ckpt("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out", "-v")
    assert done.code == 0, done.err
    for name in ("adapter_model.bin", "pytorch_model_fsdp.bin", "model.safetensors", "other/"):
        assert f"not read: {adapter}/{name}: " in done.err


def test_what_trainers_leave_next_to_an_adapter_is_not_listed(
    adapter: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "scaler.pt"):
        torch.save({"state": {0: torch.ones(2)}}, adapter / name)
    for name in ("trainer_state.json", "README.md", "tokenizer.json", "train.log"):
        (adapter / name).write_text("{}")
    done = ckpt("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out")
    assert done.code == 0 and "not read" not in done.err


# -- LLaVA: fully trained parameters under PEFT's names ------------------------------------------------------
@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a base, LoRA on its language model with a trained projector, and PEFT's merge."""
    import transformers
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(7)
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text, num_attention_heads=4, tie_word_embeddings=False),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        image_token_index=96,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder / "base")
    file = folder / "base/model.safetensors"  # under the Hub's names, because a loaded model is saved with them
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()}
    save_file(named, file, {"format": "pt"})
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "base")
    lora = LoraConfig(r=4, target_modules=r".*language_model.*\.q_proj", init_lora_weights=False)
    wrapped = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "multi_modal_projector" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
                parameter.requires_grad_(True)
    wrapped.save_pretrained(folder / "adapter")
    trained = {n: p.detach() for n, p in wrapped.named_parameters() if "lora_" not in n and p.requires_grad}
    torch.save(trained, folder / "adapter" / "non_lora_trainables.bin")
    wrapped.merge_and_unload().save_pretrained(folder / "truth")
    return folder


def test_parameters_trained_in_full_are_merged(llava: Path, tmp_path: Path) -> None:
    base, adapter, out = llava / "base", llava / "adapter", tmp_path / "out"
    done = ckpt("merge-lora", adapter, "--base", base, "-o", out)
    assert done.code == 0 and "non_lora_trainables.bin belongs to the adapter" in done.err
    truth, merged = weights(llava / "truth"), weights(out)
    assert differing(truth, merged) == []
    verify = ("verify", base, out, "--adapter", adapter)
    assert ckpt(*verify).code == 0
    left = ckpt(
        "merge-lora", adapter, "--base", base, "-o", tmp_path / "left", "--ignore-file", "non_lora_trainables.bin"
    )
    assert left.code == 0
    verified = ckpt("verify", base, tmp_path / "left", "--adapter", adapter)
    assert verified.code == 1 and "multi_modal_projector.linear_1.weight: the adapter changes it" in verified.out


def test_a_converted_adapter_has_the_parameters_trained_in_full(llava: Path, tmp_path: Path) -> None:
    """PEFT loads the single converted file."""
    from peft import PeftModel
    from transformers import LlavaForConditionalGeneration

    assert ckpt("check", llava / "adapter").code == 0
    assert ckpt("convert", "peft", "peft", llava / "adapter", "-o", tmp_path / "copy").code == 0
    model = PeftModel.from_pretrained(
        LlavaForConditionalGeneration.from_pretrained(llava / "base"), tmp_path / "copy"
    ).merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    truth, merged = weights(llava / "truth"), weights(tmp_path / "merged")
    assert all(same(truth[name], merged[name]) for name in truth)


def test_parameters_that_the_base_lacks_are_refused_by_their_file(
    adapter: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    file = adapter / "non_lora_state_dict.bin"
    torch.save({"base_model.model.model.mm_projector.0.weight": torch.ones(4, 4)}, file)
    merge = ("merge-lora", adapter, "--base", bases["llama"], "-o", tmp_path / "out")
    refused = ckpt(*merge)
    assert refused.code == 6 and f"file: {file}" in refused.err
    assert ckpt(*merge, "--ignore-file", file.name).code == 0


def test_a_tensor_that_two_files_hold_with_other_values(adapter: Path, tmp_path: Path) -> None:
    """LLaVA's script may save a module that PEFT also saves."""
    file, name = adapter / "adapter_model.safetensors", "base_model.model.score.weight"
    save_file(load_file(file) | {name: torch.ones(2, 32)}, file)
    other = {"base_model.model.score.modules_to_save.default.weight": torch.ones(2, 32)}
    torch.save(other, adapter / "non_lora_trainables.bin")
    counted = json.loads(ckpt("inspect", adapter, "--json").out)
    torch.save({name: tensor + 1 for name, tensor in other.items()}, adapter / "non_lora_trainables.bin")
    refused = ckpt("inspect", adapter)
    assert refused.code == 4 and "disagree about this tensor" in refused.err
    (adapter / "non_lora_trainables.bin").unlink()
    assert counted["parameters"] == json.loads(ckpt("inspect", adapter, "--json").out)["parameters"]
