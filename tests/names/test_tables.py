"""`converters/names/families/tables.py`, `rows.py`, `module_tree.py`, `converters/names/hub/save_pretrained.py`.

Tables of Hub files must match what transformers' models save for the same config, and register as parameters.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt.errors import CorruptError
from converters.names.families import tables as families
from converters.names.families.module_tree import ModuleTree
from converters.names.families.tables import FAMILIES
from converters.names.hub import save_pretrained as installed
from converters.names.megatron import relation as megatron
from converters.names.transformers.order import as_registered
from tests.support.twins import SAME_NAMES, TWINS, twin_of

transformers = pytest.importorskip("transformers", minversion="5")

#: All sizes differ, so that a mix-up shows. Each applies if the config class has the attribute.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_layers": 24,  # GPT-Neo lists a kind for each layer
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 5),
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "intermediate_size_mlp": 52,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    "n_shared_experts": 3,
    "moe_num_shared_experts": 2,
    "moe_k": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 67,
    "n_positions": 71,
    "layer_types": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Other entries that change the tensors. Each value is tried separately if the class has the entry.
CHANGES: dict[str, Any] = {
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "q_lora_rank": None,
    "moe_layers": [1, 2],
    "interleave_moe_layer_step": 2,
    "moe_layer_interval": 2,
    "full_attention_interval": 2,
    "time_step_rank": 3,
    "expand": 3,
    "block_size": 16,
    "max_position_embeddings": 73,
}
#: Flags to invert one at a time.
FLAGS = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "lm_head_bias"),
    *("tie_word_embeddings", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "multi_query", "use_conv_bias"),
)
#: Model types that use another type's class.
BORROWED = {"internlm3": "llama", "iquestcoder": "llama"}
#: Exceptions: other classes read `head_dim` from the config even if they don't declare it.
NO_HEAD_DIM = ("phi", "gpt2")


def variants(model_type: str) -> list[dict[str, Any]]:
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    found: list[dict[str, Any]] = [{}]
    if model_type == "internlm3":  # its class sets both together
        return [*found, {"attention_bias": True, "mlp_bias": True}]
    found += [{flag: not known[flag]} for flag in FLAGS if flag in known]
    found += [{name: value} for name, value in CHANGES.items() if name in known]
    return found


def base_of(model_type: str) -> dict[str, Any]:
    known = transformers.CONFIG_MAPPING[model_type]().to_dict()
    wanted = {name: value for name, value in SIZES.items() if name in known}
    return wanted if model_type in NO_HEAD_DIM else {**wanted, "head_dim": SIZES["head_dim"]}


def really_saved(model_type: str, cls: Any, change: dict[str, Any], folder: Path) -> tuple[dict, dict]:
    """Save a model and return its config.json and the tensor shapes by name. Check the order of its parameters."""
    config = transformers.CONFIG_MAPPING[model_type].from_dict({**base_of(model_type), **change})
    config.num_labels = 3
    model = cls(config)
    registered = [name for name, _ in model.named_parameters()]
    assert as_registered(sorted(registered), model_type) == registered, (change, cls.__name__)
    conv1d = {name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    assert bool(conv1d) is FAMILIES[model_type].conv1d and all("h" in name.split(".") for name in conv1d)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return json.loads((folder / "config.json").read_text()), shapes


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - TWINS.keys()))
def test_a_table_says_what_is_really_saved(tmp_path: Path, model_type: str) -> None:
    family, compared = FAMILIES[model_type], 0
    for number, change in enumerate(variants(model_type)):
        heads = (family.causal,) if change else (family.causal, "ForSequenceClassification", "Model")
        for head in heads:
            cls = getattr(transformers, family.stem + head, None)
            if cls is None or cls.config_class.model_type not in (model_type, BORROWED.get(model_type)):
                continue
            config, truth = really_saved(model_type, cls, change, tmp_path / f"{number}{head}")
            found = families.saved(config)
            if any(change.get(name) for name in family.unknown):
                assert found is None
                continue
            assert found is not None
            assert dict(found.required) == truth, (change, cls.__name__)
            compared += 1
    assert compared


def test_order_of_models_that_answer_questions() -> None:
    """Ten of them have `transformer.` in front of the model's names instead of `model.`."""
    compared = 0
    for model_type in sorted(FAMILIES.keys() - TWINS.keys()):
        cls = getattr(transformers, f"{FAMILIES[model_type].stem}ForQuestionAnswering", None)
        if cls is None or cls.config_class.model_type != model_type:
            continue
        with torch.device("meta"):
            model = cls(transformers.CONFIG_MAPPING[model_type].from_dict(base_of(model_type)))
        names = [name for name, _ in model.named_parameters()]
        assert as_registered(sorted(names), model_type) == names, cls.__name__
        compared += 1
    assert compared > 20


def test_order_follows_rows_and_their_first_modules() -> None:
    rows = ("a.x.weight", "a.#.up", "a.scale", "b.weight", "a.x.bias")
    names = ["a.scale", "a.x.weight", "a.x.bias", "a.2.up", "a.10.up", "a.y.weight", "a.y.bias", "b.weight"]
    assert sorted(sorted(names), key=ModuleTree.of(rows).key) == names
    swapped = ModuleTree.of((rows[3], *rows[:3]))
    assert min(names, key=swapped.key) == "b.weight"
    assert swapped.has("a.7.up") and not any(map(swapped.has, ("a.7", "a.x.weight.up", "a.z.up", "a.x.bias")))


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_neox", "qwen3_moe"])
def test_transformers_is_asked_for_what_it_really_saves(tmp_path: Path, model_type: str) -> None:
    """Without ckpt's tables, the answer from transformers matches its saved files."""
    for tied in (False, True):
        cls = getattr(transformers, FAMILIES[model_type].stem + "ForCausalLM")
        config, truth = really_saved(model_type, cls, {"tie_word_embeddings": tied}, tmp_path / str(tied))
        found = installed.saved(config)
        assert found is not None and dict(found.required) == truth
        assert len(found.optional) == tied


@pytest.mark.parametrize("model_type", SAME_NAMES)
def test_a_model_type_without_a_class_has_the_tensors_of_its_twin(model_type: str) -> None:
    twin = twin_of(model_type)
    config = {**base_of(twin), "num_nextn_predict_layers": 0}
    found, other = (families.saved({**config, "model_type": name}) for name in (model_type, twin))
    assert found is not None and other is not None
    assert found.required == other.required


#: `ministral`'s class rejects a config without these entries.
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - TWINS.keys() - {"ministral"}))
def test_what_a_config_leaves_out_is_what_its_class_takes(model_type: str) -> None:
    """Configs from transformers 4 omit the base class's defaults. A release may lack entries added later."""
    family = FAMILIES[model_type]
    config = {**base_of(model_type), "model_type": model_type, "architectures": [family.stem + family.causal]}
    silent = {name: value for name, value in config.items() if value is not None and name != "head_dim"}
    found, other = families.saved(silent), installed.saved(silent)
    assert found is not None and other is not None
    assert dict(found.required) == dict(other.required)


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - TWINS.keys()))
def test_entries_that_a_class_does_not_read_change_nothing(model_type: str) -> None:
    """A config may come from another architecture with the same tensor names."""
    known, family = transformers.CONFIG_MAPPING[model_type], FAMILIES[model_type]
    stray = dict.fromkeys(set(FLAGS) - known().to_dict().keys() - known.attribute_map.keys(), True)
    config = known.from_dict(base_of(model_type)).to_dict() | {"architectures": [family.stem + family.causal]}
    config = json.loads(json.dumps({**config, **stray}, default=str))
    found, other = families.saved(config), installed.saved(config)
    assert found is not None and other is not None
    assert dict(found.required) == dict(other.required)


@pytest.mark.parametrize("model_type", [name for name in megatron.architectures() if name in FAMILIES])
def test_megatrons_tables_and_these_are_of_the_same_tensors(model_type: str) -> None:
    config = {**base_of(twin_of(model_type)), "model_type": model_type, "num_nextn_predict_layers": 0}
    if model_type in TWINS:
        config = TWINS[model_type].config(model_type, config)
    if model_type in ("gpt_neox", "mimo", "qwen2"):
        config.pop("head_dim", None)
    table = megatron.table_of(model_type)
    sizes = table.family.sizes(config)
    found = families.saved(config)
    assert found is not None
    assert dict(table.relation(sizes, sizes.dims["v"], {}).a_shapes) == dict(found.required)


def test_layers_of_multi_token_prediction_may_be_there() -> None:
    """DeepSeek-V3's release has the layers, but transformers omits them."""
    config = {**base_of("deepseek_v3"), "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    found = families.saved(config)
    assert found is not None
    assert found.optional["model.layers.4.eh_proj.weight"] == (32, 64)
    assert found.optional["model.layers.4.mlp.experts.4.down_proj.weight"] == (32, 12)
    table = megatron.table_of("deepseek_v3")
    sizes = table.family.sizes(config)
    both = {**found.required, **found.optional}
    assert dict(table.relation(sizes, sizes.dims["v"], table.copies(sizes)).a_shapes) == both


def test_a_model_of_36945_tensors_takes_no_time() -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "num_experts": 128,
        "moe_intermediate_size": 1536,
    }
    start = time.process_time()
    found = families.saved(config)
    assert found is not None and len(found.required) == 36_945
    assert time.process_time() - start < 1


def test_a_config_without_a_size() -> None:
    with pytest.raises(CorruptError, match="does not state a size"):
        families.saved({"model_type": "llama"})


@pytest.mark.parametrize(
    ("model_type", "entry", "value"),
    [
        ("deepseek_v3", "n_shared_experts", {"a": 1}),
        ("deepseek_v3", "first_k_dense_replace", "a"),
        ("qwen3_moe", "mlp_only_layers", "a"),
    ],
)
def test_an_entry_of_another_kind_is_an_error_that_names_it(model_type: str, entry: str, value: Any) -> None:
    with pytest.raises(CorruptError) as caught:
        families.saved({**base_of(model_type), "model_type": model_type, entry: value})
    assert entry in str(caught.value.expected)


@pytest.mark.parametrize("model_type", ["minimax", "qwen3_next"])
@pytest.mark.parametrize("types", [["linear_attention"], "linear_attention"])
def test_a_list_of_layers_that_is_too_short_is_an_error_that_names_it(model_type: str, types: Any) -> None:
    config = {**base_of(model_type), "model_type": model_type, "layer_types": types}
    with pytest.raises(CorruptError, match="does not list every layer"):
        families.saved(config)
