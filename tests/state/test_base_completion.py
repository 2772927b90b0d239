"""`ckpt/state/base_completion.py`, `ckpt/state/same_model.py`, `converters/names/hub/expected_tensors.py`: bases.

Tensors in the config but missing from a run are reported, and copied from a base.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import ckpt as package
from ckpt.errors import LossError, UsageError
from converters.names.hub.expected_tensors import missing_parts
from tests.support.adapters import same, save_base
from tests.support.architectures import numbered
from tests.support.commands import ckpt
from tests.support.model_files import merge_json

transformers = pytest.importorskip("transformers", minversion="5.23")

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 20, "intermediate_size": 26, "num_heads": 2, "patch_size": 7}
PROMISE = {"mtp_num_hidden_layers": 1}


def saved(folder: Path, model_type: str, kind: Any, **entries: Any) -> Path:
    config = transformers.CONFIG_MAPPING[model_type](**entries)
    numbered(kind.from_config(config)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with a vision tower."""
    text = {"model_type": "qwen2_5_vl_text", **SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
    vision = {**TOWER, "model_type": "qwen2_5_vl", "out_hidden_size": 24, "fullatt_block_indexes": [1]}
    folder = tmp_path_factory.mktemp("sees") / "base"
    kind = transformers.AutoModelForImageTextToText
    return saved(folder, "qwen2_5_vl", kind, text_config=text, vision_config=vision)


@pytest.fixture(scope="module")
def predicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release-like model with multi-token prediction, ignored by transformers."""
    folder = tmp_path_factory.mktemp("predicts") / "base"
    sizes = {
        **SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 11,
        "shared_expert_intermediate_size": 12,
        "num_experts": 4,
    }
    saved(folder, "qwen3_next", transformers.AutoModelForCausalLM, **sizes, num_experts_per_tok=2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {"mtp.fc.weight": torch.randn(24, 48).bfloat16(), "mtp.norm.weight": torch.randn(24).bfloat16()}
    save_file(tensors, file, metadata={"format": "pt"})
    merge_json(folder / "config.json", PROMISE)
    return folder


def without(base: Path, folder: Path, word: str, fill: float = 1.0) -> Path:
    """Write a fully trained run of the base with FSDP2's DCP, without tensors with `word` in their names."""
    tensors = load_file(base / "model.safetensors")
    kept = {name: tensor + fill for name, tensor in tensors.items() if word not in name}
    assert 0 < len(kept) < len(tensors)
    dcp.save({"model": kept}, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


def equal(a: Path, b: dict[str, torch.Tensor]) -> bool:
    found = load_file(a / "model.safetensors")
    return found.keys() == b.keys() and all(same(found[name], b[name]) for name in b)


@pytest.mark.parametrize("word", ["visual", "embed_tokens", "layers.1."])
def test_what_a_run_lacks_is_refused_with_the_cures_and_taken_from_a_base(
    sees: Path, word: str, tmp_path: Path
) -> None:
    run, base = without(sees, tmp_path / "run", word), load_file(sees / "model.safetensors")
    refused = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "none")
    assert refused.code == LossError.exit_code and not (tmp_path / "none").exists()
    for cure in ("--complete-from BASE", "--names own", "a config.json without these parts"):
        assert cure in refused.err
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out", "--complete-from", sees, "--verify")
    assert done.code == 0, done.err
    assert equal(tmp_path / "out", {name: t if word in name else t + 1 for name, t in base.items()})
    num = sum(word in name for name in base)
    (listed,) = [line for line in done.err.splitlines() if "added unchanged" in line]
    assert listed.count(f"({num} tensor") == 1 or word == "visual", listed
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)[1]
    assert not model["missing_keys"] and not model["unexpected_keys"]


def test_multi_token_prediction_that_is_not_there_is_said_and_taken_from_a_base(predicts: Path, tmp_path: Path) -> None:
    run, base = without(predicts, tmp_path / "run", "mtp."), load_file(predicts / "model.safetensors")
    promise = "promised by the config but missing: 1 multi-token prediction layer (mtp_num_hidden_layers)"
    plain = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "plain")
    assert plain.code == 0 and f"note: {promise}: use --complete-from BASE" in plain.err
    for folder in (run, tmp_path / "plain"):
        checked = ckpt("check", folder)
        assert checked.code == 0 and f"  - config.json: {promise}" in checked.out, checked.out
    assert promise not in ckpt("check", predicts).out
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out", "--complete-from", predicts, "--json")
    assert done.code == 0 and promise not in done.err
    assert equal(tmp_path / "out", {name: t if "mtp." in name else t + 1 for name, t in base.items()})
    notes = json.loads(done.out)["notes"]
    said = f"added unchanged from {predicts}, because the run lacks it: mtp.fc (1 tensor, 2.30 kB), mtp.norm"
    assert notes[0].startswith(said), notes
    assert promise not in ckpt("check", tmp_path / "out").out


def test_a_config_without_the_promise_is_another_cure(predicts: Path, tmp_path: Path) -> None:
    run = without(predicts, tmp_path / "run", "mtp.")
    merge_json(run / "config.json", {"mtp_num_hidden_layers": 0})
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out")
    assert done.code == 0 and "promised" not in done.err and "promised" not in ckpt("check", run).out


def test_check_says_what_a_folder_lacks_of_what_its_config_promises(sees: Path, tmp_path: Path) -> None:
    run = without(sees, tmp_path / "run", "visual")
    assert "promised by the config but missing: a vision tower (vision_config)" in ckpt("check", run).out
    own = tmp_path / "own"
    assert ckpt("convert", "dcp", "hf", run, "-o", own, "--names", "own").code == 0
    assert "a vision tower (vision_config)" in ckpt("check", own).out
    frozen = tmp_path / "frozen"
    package.convert(without(sees, tmp_path / "2", "layers.1."), "hf", frozen, names="own")
    checked = package.check(frozen)
    assert not checked.whole and "from Qwen2_5_VLForConditionalGeneration's files" in str(checked)
    assert "promised" not in ckpt("check", sees).out


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (r"\.layers\.0\.", ["12 tensors from Qwen2_5_VLForConditionalGeneration's files: model.layers.0."]),
        (
            r"embed_tokens",
            ["1 tensor from Qwen2_5_VLForConditionalGeneration's files: model.embed_tokens.weight"],
        ),
        (r"visual|\.layers\.0\.", ["a vision tower (vision_config)", "12 tensors from"]),
    ],
)
def test_check_says_which_frozen_parts_fsdp_did_not_save(
    frozen: str, said: list[str], sees: Path, tmp_path: Path
) -> None:
    """The names are those in the live model, and differ from its files."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(sees)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = re.search(frozen, name) is None
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "run/config.json").write_text((sees / "config.json").read_text())
    checked = ckpt("check", tmp_path / "run")
    assert checked.code == 0 and all(f"promised by the config but missing: {one}" in checked.out for one in said), (
        checked.out
    )
    done = ckpt("convert", "dcp", "hf", tmp_path / "run", "-o", tmp_path / "out", "--complete-from", sees)
    assert done.code == 0 and equal(tmp_path / "out", load_file(sees / "model.safetensors"))
    assert "promised" not in ckpt("check", tmp_path / "out").out


def test_a_model_that_lacks_nothing_is_as_it_was(sees: Path, tmp_path: Path) -> None:
    done = ckpt("convert", "hf", "hf", sees, "-o", tmp_path / "out", "--complete-from", sees)
    assert done.code == 0 and "nothing was added from" in done.err
    assert equal(tmp_path / "out", load_file(sees / "model.safetensors"))


def test_a_tied_output_layer_is_not_taken(tmp_path: Path) -> None:
    base = save_base("llama", torch.bfloat16, tmp_path / "base")
    run = without(base, tmp_path / "run", "lm_head")
    merge_json(run / "config.json", {"tie_word_embeddings": True})
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out", "--complete-from", base)
    assert done.code == 0 and "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_another_model_is_refused(sees: Path, predicts: Path, tmp_path: Path) -> None:
    run = without(predicts, tmp_path / "run", "mtp.")
    with pytest.raises(UsageError, match="not the run's base model"):
        package.convert(run, "hf", tmp_path / "out", complete_from=sees)
    small = saved(
        tmp_path / "small",
        "qwen3_next",
        transformers.AutoModelForCausalLM,
        **{**SIZES, "hidden_size": 16, "head_dim": 8},
    )
    with pytest.raises(LossError, match="a tensor has another shape"):
        package.convert(run, "hf", tmp_path / "out", complete_from=small)
    assert not (tmp_path / "out").exists()


def test_a_base_with_other_layers_of_text_is_refused(sees: Path, tmp_path: Path) -> None:
    """Its names and shapes fit, but its last layer would fill the run's missing layer."""
    run = without(sees, tmp_path / "run", "layers.2.")
    config = json.loads((run / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="not the run's base model"):
        package.convert(run, "hf", tmp_path / "out", names="own", complete_from=sees)


def test_a_config_that_is_not_the_bases_is_said(sees: Path, tmp_path: Path) -> None:
    """The tower's tensors fit, and the output has the run's config."""
    run = without(sees, tmp_path / "run", "visual")
    config = json.loads((run / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "gelu"
    (run / "config.json").write_text(json.dumps(config))
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out", "--complete-from", sees)
    assert f"vision_config.hidden_act is 'gelu' in the run's config.json, and 'silu' in {sees}" in done.err
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "same", "--complete-from", tmp_path / "out")
    assert done.code == 0 and "in the run's config.json" not in done.err


def test_a_resized_vocabulary_stays_the_runs(sees: Path, tmp_path: Path) -> None:
    tensors = load_file(sees / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "visual" not in name}
    kept |= {name: torch.zeros(40, 24).bfloat16() for name in kept if "embed_tokens" in name or "lm_head" in name}
    dcp.save({"model": kept}, checkpoint_id=tmp_path / "run", no_dist=True)
    config = json.loads((sees / "config.json").read_text())
    config["text_config"]["vocab_size"] = 40
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    package.convert(tmp_path / "run", "hf", tmp_path / "out", complete_from=sees)
    assert equal(tmp_path / "out", {**tensors, **kept})


@pytest.mark.parametrize("target", ["dcp", "zero3", "peft"])
def test_only_a_model_alone_is_completed(target: str, sees: Path, tmp_path: Path) -> None:
    outcome = ckpt("convert", "hf", target, sees, "-o", tmp_path / "out", "--complete-from", sees)
    assert outcome.code == 2 and "--complete-from writes models only" in outcome.err


def test_the_base_is_no_destination(sees: Path, tmp_path: Path) -> None:
    outcome = ckpt("convert", "hf", "hf", sees, "-o", sees / "out", "--complete-from", sees)
    assert outcome.code == 2
    run = without(sees, tmp_path / "run", "visual")
    outcome = ckpt("convert", "dcp", "hf", run, "-o", sees, "--overwrite", "--complete-from", sees)
    assert outcome.code == 2 and (sees / "model.safetensors").is_file()


def test_a_base_that_is_called_as_on_the_hub_is_told_how_to_be_named(predicts: Path, tmp_path: Path) -> None:
    run = without(predicts, tmp_path / "run", "mtp.")
    done = ckpt("convert", "dcp", "hf", run, "-o", tmp_path / "out", "--complete-from", "org/spelled-wrong")
    assert done.code == 3 and "hint: to read it from the Hub, give hf://org/spelled-wrong" in done.err
    assert not (tmp_path / "out").exists()


def test_layers_behind_the_last_one_are_multi_token_prediction_of_deepseeks_releases(tmp_path: Path) -> None:
    """Every config that transformers saves declares one such layer, but the files lack its tensors."""
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 3, "kv_lora_rank": 8}
    sizes |= {"q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    base = saved(tmp_path / "base", "deepseek_v3", transformers.AutoModelForCausalLM, **sizes)
    dcp.save({"model": load_file(base / "model.safetensors")}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "run/config.json").write_text((base / "config.json").read_text())
    promise = "promised by the config but missing: 1 multi-token prediction layer (num_nextn_predict_layers)"
    assert promise in ckpt("check", tmp_path / "run").out
    without_it = ckpt("convert", "dcp", "hf", tmp_path / "run", "-o", tmp_path / "plain", "--complete-from", base)
    assert without_it.code == 0 and "nothing was added from" in without_it.err and promise in without_it.err
    predicted = {"model.layers.3.eh_proj.weight": torch.randn(24, 48), "model.layers.3.enorm.weight": torch.randn(24)}
    tensors = {**load_file(base / "model.safetensors"), **predicted}
    (base / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, base / file, {"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    done = ckpt("convert", "dcp", "hf", tmp_path / "run", "-o", tmp_path / "out", "--complete-from", base)
    assert done.code == 0 and "model.layers.3 (2 tensors" in done.err and promise not in done.err
    assert equal(tmp_path / "out", tensors)  # fp32 from the base, although the run is bf16


@pytest.mark.parametrize(
    "entries",
    [{"num_mtp_layers": 2}, {"text_config": {"num_mtp_layers": 2}}, {"num_mtp_modules": 2}, {"mtp_num_layers": 2}],
)
def test_configs_call_layers_of_multi_token_prediction_otherwise(entries: dict[str, Any]) -> None:
    (found,) = missing_parts(entries, {"model.norm.weight": (4,)})
    assert found.startswith("promised by the config but missing: 2 multi-token prediction layers")
    assert not missing_parts(entries, {"model.norm.weight": (4,), "model.mtp.layers.0.norm.weight": (4,)})
