"""`converters/names/hub/proof.py`: `hf` files have only names of the config's architecture, unless asked otherwise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import api
from ckpt.errors import LossError, UsageError
from ckpt.plan.checkpoint import Layout
from converters.names.hub import save_pretrained as installed
from converters.names.hub.proof import prove
from tests.support.loaded import save_loaded
from tests.support.model_files import save_model

transformers = pytest.importorskip("transformers", minversion="5")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def run(folder: Path, change: Change = lambda tensors, config: None) -> Path:
    """Save a trained tiny Llama as a `full` checkpoint with its config."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(LLAMA))
    tensors, config = {name: tensor.clone() for name, tensor in model.state_dict().items()}, dict(LLAMA)
    change(tensors, config)
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def convert(folder: Path, **layout: Any) -> Path:
    out = folder.with_name(f"{folder.name}-hf")
    ckpt.plan(ckpt.open(folder, "full"), "hf", Layout(**layout)).run(out)
    return out


def renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.gate_prj.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")


def reshaped(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.ones(16, 25)


def one_more(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["value.weight"] = torch.ones(1, 16)


def one_less(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["model.layers.0.self_attn.k_proj.weight"]


def prefixed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    every = {name if "lm_head" in name else f"policy.{name}": tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(every)


def other_config(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config.update(model_type="mistral", architectures=["MistralForCausalLM"], num_hidden_layers=3)


def padded(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.ones(40, 16)


def with_adapter(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    every = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(every)


WRONG: dict[str, tuple[Change, str]] = {
    "a name": (renamed, "1 too many: model.layers.1.mlp.gate_prj.weight; 1 missing: model.layers.1.mlp.gate_proj"),
    "a shape": (reshaped, r"1 of another shape: model.layers.1.mlp.down_proj.weight \[16, 25\] instead of \[16, 24\]"),
    "a name more": (one_more, "1 too many: value.weight$"),
    "a name less": (one_less, "1 missing: model.layers.0.self_attn.k_proj.weight$"),
    "prefixes": (prefixed, r"20 too many: policy\..* and 18 more; 20 missing: .* and 18 more"),
    "a config": (other_config, "9 missing: model.layers.2.* and 7 more"),
    "a vocabulary": (padded, r"2 of another shape: model.embed_tokens.weight \[40, 16\] instead of \[32, 16\]"),
}


def test_a_model_with_an_adapter_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", with_adapter)
    with pytest.raises(UsageError, match="a model with PEFT adapters") as caught:
        convert(folder)
    assert f"ckpt merge-lora {folder}" in str(caught.value) and f" peft {folder}`" in str(caught.value)
    assert not (tmp_path / "run-hf").exists()


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_the_architectures_is_refused_with_the_differences(tmp_path: Path, case: str) -> None:
    change, difference = WRONG[case]
    folder = run(tmp_path / "run", change)
    with pytest.raises(LossError, match="(?m)" + difference) as caught:
        convert(folder)
    assert "names='own'" in str(caught.value) and not (tmp_path / "run-hf").exists()
    if case == "an adapter":
        assert "ckpt merge-lora" in str(caught.value) and "peft" in str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_it_is_written_as_it_stands_where_that_is_asked_for(tmp_path: Path, case: str) -> None:
    folder = run(tmp_path / "run", WRONG[case][0])
    truth = torch.load(folder / "pytorch_model.bin", weights_only=True)
    written = load_file(convert(folder, names="own") / "model.safetensors")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name]) for name in truth)


def test_what_is_right_is_written_and_one_line_says_that_it_loads(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    plan = ckpt.plan(ckpt.open(folder, "full"), "hf").plan
    loads = "from_pretrained finds every tensor: names and shapes match LlamaForCausalLM"
    assert [note for note in plan.target.notes if "names" in note] == [loads]
    assert len(load_file(convert(folder) / "model.safetensors")) == 21


def test_a_name_flipped_in_the_header_is_told_when_it_is_read(tmp_path: Path) -> None:
    """Only the model in the config reveals the flip. The file's bytes don't."""
    folder = convert(run(tmp_path / "run"))
    assert ckpt.open(folder).notes == ()
    file = folder / "model.safetensors"
    name = b"layers.1.mlp.up_proj.weight"
    data = file.read_bytes()
    assert data.count(name) == 1
    file.write_bytes(data.replace(name, name.replace(b"weight", b"weaght")))
    (note,) = ckpt.open(folder).notes
    assert note == (
        "names or shapes don't match LlamaForCausalLM's save_pretrained: "
        "1 too many: model.layers.1.mlp.up_proj.weaght; 1 missing: model.layers.1.mlp.up_proj.weight"
    )


def test_the_proof_of_a_known_architecture_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = "import sys, ckpt; ckpt.plan(ckpt.open(sys.argv[1], 'full'), 'hf')\n"
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    folder = run(tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def unknown(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config.update(model_type="nobodys", architectures=["NobodysForCausalLM"], auto_map={"AutoModel": "m.M"})


@pytest.mark.parametrize("has_transformers", [True, False])
def test_an_unknown_architecture_is_written_with_its_own_names_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_transformers: bool
) -> None:
    monkeypatch.setattr(installed, "is_available", lambda: has_transformers)
    folder = run(tmp_path / "run", unknown)
    target = ckpt.plan(ckpt.open(folder, "full"), "hf").plan.target
    how = "load the output with the model's own code" if has_transformers else "pip install 'transformers>=5' torch"
    note = f"not compared with NobodysForCausalLM: its files are unknown to ckpt; {how} to compare them"
    assert [one for one in target.notes if one.endswith(note)]
    assert target.loads is not None and target.loads.can is None and "not compared" in target.loads.why
    truth = torch.load(folder / "pytorch_model.bin", weights_only=True)
    written = load_file(convert(folder) / "model.safetensors")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name]) for name in truth)


def without_class(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config.clear()


@pytest.mark.parametrize(("change", "why"), [(unknown, "NobodysForCausalLM"), (without_class, "no model_type")])
def test_strict_refuses_names_that_nothing_compares(tmp_path: Path, change: Change, why: str) -> None:
    folder = run(tmp_path / "run", change)
    with pytest.raises(UsageError, match=f"can't be compared(?s:.*){why}(?s:.*)leave strict=True out"):
        convert(folder, strict=True)
    assert not (tmp_path / "run-hf").exists()
    assert len(load_file(convert(folder, strict=True, names="own") / "model.safetensors")) == 21


def test_strict_writes_names_that_were_compared(tmp_path: Path) -> None:
    assert len(load_file(convert(run(tmp_path / "run"), strict=True) / "model.safetensors")) == 21


def test_a_class_of_another_architecture(tmp_path: Path) -> None:
    """The config contradicts itself: no transformers class has these names."""
    folder = run(tmp_path / "run", lambda tensors, config: config.update(architectures=["Qwen2ForCausalLM"]))
    with pytest.raises(UsageError, match=r"a class of another model_type(?s:.*)model_type 'llama', Qwen2ForCausalLM"):
        convert(folder)


def test_a_model_without_a_config_keeps_its_names_unchecked(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prefixed)
    (folder / "config.json").unlink()
    loads = ckpt.plan(ckpt.open(folder, "full"), "hf").plan.target.loads
    assert loads is not None and loads.can is False and loads.why == "config.json is missing"
    (folder / "config.json").write_text('{"train_batch_size": 4}')
    loads = ckpt.plan(ckpt.open(folder, "full"), "hf").plan.target.loads
    assert loads is not None and loads.can is False and "no model_type" in loads.why


# -- correct input is accepted ---------------------------------------------------------------------------------
def notes_of(folder: Path) -> tuple[str, ...]:
    return ckpt.plan(ckpt.open(folder, "hf"), "hf").plan.target.notes


def test_older_files_of_gpt2_without_a_prefix_and_with_masks(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    tensors = {name.removeprefix("transformer."): t.clone() for name, t in model.state_dict().items()}
    del tensors["lm_head.weight"]
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(())}
    stated = {**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}
    assert any("'transformer'" in note for note in notes_of(save_model(tmp_path / "gpt2", tensors, stated)))


def test_frequencies_of_older_files_and_a_tied_head_once_more(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(LLAMA))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    folder = save_model(tmp_path / "llama", tensors, {**LLAMA, "tie_word_embeddings": True})
    assert any("lm_head.weight" in note for note in notes_of(folder))


@pytest.mark.parametrize("wrong", [False, True])
def test_weights_in_mxfp4(tmp_path: Path, wrong: bool) -> None:
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=3,
        vocab_size=16,
    )
    model = transformers.GptOssForCausalLM(config)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, (rows, columns) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
        del tensors[f"model.layers.0.mlp.experts.{name}"]
        blocks = torch.zeros(3, rows, columns // 32 + wrong, 16, dtype=torch.uint8)
        tensors[f"model.layers.0.mlp.experts.{name}_blocks"] = blocks
        tensors[f"model.layers.0.mlp.experts.{name}_scales"] = blocks[..., 0].clone()
    stated = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    folder = save_model(tmp_path / "oss", tensors, {**stated, "quantization_config": {"quant_method": "mxfp4"}})
    if wrong:
        with pytest.raises(LossError, match=r"shape \[3, 64, 64\], but the architecture has \[3, 32, 64\]"):
            notes_of(folder)
    else:
        notes_of(folder)
    plain = save_model(tmp_path / "plain", tensors, stated)
    found = r"holds weight shape \[3, 64, 64\]" if wrong else r"4 too many: .*_blocks.*2 missing"
    with pytest.raises(LossError, match=found):
        notes_of(plain)


# -- models inside other modules -------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["_forward_module.", "_forward_module.model.", "model.", "module.net."])
def test_a_prefix_that_all_names_have_is_left_out_and_it_is_said(tmp_path: Path, prefix: str) -> None:
    """Lightning's wrapper and a LightningModule's attribute add such path prefixes."""

    def wrapped(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        every = {prefix + name: tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(every)

    folder = run(tmp_path / "run", wrapped)
    notes = ckpt.plan(ckpt.open(folder, "full"), "hf").plan.target.notes
    assert any(f"removed the prefix '{prefix.removeprefix('module.')}' from all names" in note for note in notes)
    truth = torch.load(folder / "pytorch_model.bin", weights_only=True)
    written = load_file(convert(folder) / "model.safetensors")
    assert written.keys() == {name.removeprefix(prefix) for name in truth}
    assert all(torch.equal(written[name.removeprefix(prefix)], tensor) for name, tensor in truth.items())
    again = ckpt.plan(ckpt.open(folder, "full"), "dcp").plan  # the run's own checkpoint keeps its names
    assert {fqn for fqn, _ in again.checkpoint.tensors} == {name.removeprefix("module.") for name in truth}


def test_a_model_whose_own_names_have_one_beginning_is_in_no_other_module(tmp_path: Path) -> None:
    """In memory, all of gemma3 is below `model`, but none of its files are."""
    parts = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**parts, "vocab_size": 64, "head_dim": 8, "num_key_value_heads": 1},
        vision_config={**parts, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    folder = tmp_path / "run"
    save_loaded(model, tmp_path / "hub")
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    assert (
        load_file(convert(folder) / "model.safetensors").keys()
        == load_file(tmp_path / "hub" / "model.safetensors").keys()
    )


# -- models that load, but not under the Hub's names -----------------------------------------------------------
def test_names_that_only_transformers_loads_are_a_problem_of_the_folder(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
        vocab_size=16,
    )
    model = transformers.MixtralForCausalLM(config)
    stated = {**config.to_dict(), "architectures": ["MixtralForCausalLM"]}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loading = api.check_loads(save_model(tmp_path / "memory", tensors, stated))
    assert len(loading.problems) == 1 and "too many: model.layers.0.mlp.experts." in loading.problems[0]
    model.save_pretrained(tmp_path / "hub")
    assert api.check_loads(tmp_path / "hub").good


def test_a_config_without_a_class_judges_no_names(tmp_path: Path) -> None:
    """By default Whisper's config builds only a decoder. Contradicting shapes and other names are still refused."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(**sizes, **heads, **tokens, max_source_positions=8, max_target_positions=8)
    model = transformers.WhisperForConditionalGeneration(config)
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "model.pt")
    config.save_pretrained(tmp_path / "run")
    assert "architectures" not in json.loads((tmp_path / "run" / "config.json").read_text())
    made = api.convert(tmp_path / "run", "hf", tmp_path / "out")
    assert any("names no class" in line for line in made.conversion.plan.target.notes)
    loaded, info = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(LossError, match="of another shape"):
        prove(config.to_dict() | {"d_model": 32}, shapes, "")
    with pytest.raises(LossError, match="too many"):
        prove(config.to_dict(), {f"other.{name}": shape for name, shape in shapes.items()}, "")


# -- diffusers -------------------------------------------------------------------------------------------------
_DIFFUSERS = """
import torch
class ModelMixin(torch.nn.Linear):
    @classmethod
    def from_config(cls, config):
        return cls(config["width"], 2)
class TinyModel(ModelMixin): ...
"""


def diffusion_run(folder: Path, **entries: Any) -> Path:
    folder.mkdir()
    torch.save({"weight": torch.rand(2, 3), "bias": torch.rand(2)}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"_class_name": "TinyModel", "width": 3, **entries}))
    return folder


def test_a_diffusers_model_gets_the_file_names_of_diffusers(tmp_path: Path) -> None:
    folder = diffusion_run(tmp_path / "run")
    target = ckpt.plan(ckpt.open(folder), "hf").plan.target
    assert [file.name for file in target.files] == ["diffusion_pytorch_model.safetensors", "config.json"]
    assert any("not compared with TinyModel" in note for note in target.notes)
    assert target.loads is not None and target.loads.can is None
    with pytest.raises(UsageError, match="pip install diffusers"):
        convert(folder, strict=True)
    out = convert(folder, max_shard_size=24)
    index = json.loads((out / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 32}
    assert index["weight_map"]["weight"] == "diffusion_pytorch_model-00002-of-00002.safetensors"


def test_the_installed_diffusers_proves_names_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "diffusers.py").write_text(_DIFFUSERS)
    spec = importlib.util.spec_from_file_location("diffusers", tmp_path / "diffusers.py")
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    monkeypatch.setitem(sys.modules, "diffusers", library)
    loads = ckpt.plan(ckpt.open(diffusion_run(tmp_path / "run")), "hf", Layout(strict=True)).plan.target.loads
    assert loads is not None and loads.can and loads.call == "TinyModel.from_pretrained"
    with pytest.raises(LossError, match=r"weight \[2, 3\] instead of \[2, 4\]"):
        convert(diffusion_run(tmp_path / "wider", width=4))
    with pytest.raises(UsageError, match=r"OtherModel(?s:.*)the model's own code"):
        convert(diffusion_run(tmp_path / "other", _class_name="OtherModel"), strict=True)
