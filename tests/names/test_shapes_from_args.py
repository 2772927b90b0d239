"""`converters/names/megatron/shapes_from_args.py`: tensors derived from Megatron-LM's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CorruptError
from converters.names.megatron.model.spelling import OUTPUT
from converters.names.megatron.shapes_from_args import check_args, expected_shapes, model_shapes
from tests.names.test_megatron import CASES, config_of, relation_of, table_of

#: Arguments required to derive any tensor.
SIZES = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4}
#: Architectures with mixed layers or other attention. Their arguments predict no tensors here.
UNTOLD = {
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "youtu",
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_tell_of_what_the_table_has(case: str) -> None:
    """Every predicted tensor has the table's shape. Other tests prove the table on megatron-core's models."""
    architecture, more = CASES[case]
    relation, sizes = relation_of(config_of(architecture, **more), padded=384)
    args = {**table_of(architecture).args(sizes), "padded_vocab_size": 384}
    expected = model_shapes(args)
    assert (expected == {}) == (architecture in UNTOLD)
    assert expected.items() <= relation.b_shapes.items()
    assert expected_shapes(args, relation.b_shapes) == expected
    check_args(args, relation.b_shapes, Path("run"))
    for name in expected:
        without = {key: shape for key, shape in relation.b_shapes.items() if key != name}
        with pytest.raises(CorruptError, match="lacks tensors"):
            check_args(args, without, Path("run"))
        with pytest.raises(CorruptError, match="shape doesn't match") as caught:
            check_args(args, {**relation.b_shapes, name: (*expected[name], 5)}, Path("run"))
        assert caught.value.fqn == name


def test_arguments_that_are_not_all_there_tell_of_nothing() -> None:
    assert len(model_shapes(SIZES)) == 13
    assert (
        model_shapes({**SIZES, "kv_channels": None})
        == model_shapes({**SIZES, "spec": ["own", "layers"]})
        == model_shapes({})
        == {}
    )


@pytest.mark.parametrize(
    "more",
    [
        {"yaml_cfg": "model.yaml", "num_query_groups": 1, "activation_func": "swiglu"},
        {"language_model_type": "llama3_8b"},
        {"noop_layers": {1}},
        {"num_experts": 2, "first_k_dense_replace": 1},
        {"transformer_layer_spec": "gemma2_layer_spec"},
        {"normalization": "L2Norm"},
        {"group_query_attention": True},
        {"num_experts": [2, 4]},
        {"num_experts": 2, "moe_layer_freq": "[0]+[1]"},
        {"num_experts": 2, "moe_layer_freq": 0},
        {"num_experts": 2, "moe_layer_freq": [1]},
        {"num_experts": 2, "moe_layer_freq": [1, 2]},
    ],
)
def test_arguments_of_another_kind_tell_of_nothing(more: dict[str, Any]) -> None:
    """Megatron-LM's examples with `yaml_cfg` have other sizes than these arguments."""
    assert model_shapes({**SIZES, **more}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "self_attention.in_proj.weight",
        "self_attention.linear_kv_up_proj.weight",
        "mixer.in_proj.weight",
        "cross_attention.linear_q.weight",
        "mlp.linear_fc1.weight_quantizer._amax",
    ],
)
def test_layers_that_have_other_tensors_are_held_against_nothing(name: str) -> None:
    """A derived trainer may have other attention without an argument for it."""
    check_args(SIZES, {f"decoder.layers.1.{name}": (8,)}, Path("run"))


def test_the_head_of_a_reward_model_and_norms_of_all_heads_are_not_refused() -> None:
    """ms-swift's `--task_type seq_cls` has such a head, and OLMoE such norms."""
    args = {**SIZES, "padded_vocab_size": 32, "untie_embeddings_and_output_weights": True, "qk_layernorm": True}
    shapes = model_shapes(args)
    norms = {name: (8,) for name in shapes if "q_layernorm" in name}
    assert len(norms) == 2 and shapes[OUTPUT] == (32, 8)
    check_args(args, {**shapes, **norms, OUTPUT: (1, 8)}, Path("run"))
    assert OUTPUT not in model_shapes({**args, "task_type": "embedding"})
    with pytest.raises(CorruptError, match="shape doesn't match"):
        check_args(args, {**shapes, OUTPUT: (1, 4)}, Path("run"))
    with pytest.raises(CorruptError, match="lacks tensors"):
        check_args(args, {name: shape for name, shape in shapes.items() if name not in norms}, Path("run"))


def test_norms_without_weights_and_positions_that_rotate_are_not_told() -> None:
    positions = {**SIZES, "position_embedding_type": "learned_absolute", "max_position_embeddings": 64}
    assert len(model_shapes(positions)) == 14
    plain = model_shapes(SIZES)
    assert model_shapes({**SIZES, "qk_layernorm": True, "qk_l2_norm": True}) == plain
    for more in ({"use_rotary_position_embeddings": True}, {"add_position_embedding": False}):
        assert model_shapes({**positions, **more}) == plain


@pytest.mark.parametrize("name", ["swiglu", "quick_geglu", "gated_linear_unit"])
def test_gates_double_the_rows(name: str) -> None:
    assert model_shapes({**SIZES, name: True})["decoder.layers.0.mlp.linear_fc1.weight"] == (32, 8)


@pytest.mark.parametrize(("often", "sparse"), [(1, {0, 1, 2, 3}), (2, {0, 2}), ([0, 1, 1, 0], {1, 2})])
def test_layers_with_experts_are_counted_as_megatron_lm_does(often: int | list[int], sparse: set[int]) -> None:
    names = model_shapes({**SIZES, "num_layers": 4, "num_experts": 2, "moe_layer_freq": often})
    assert {int(name.split(".")[2]) for name in names if name.endswith(".mlp.router.weight")} == sparse
