"""`converters/names/megatron/told.py`: the tensors that Megatron-LM's arguments tell of, against every table."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import CorruptError
from converters.names.megatron.told import check_args, told
from tests.names.test_megatron import CASES, config_of, relation_of, table_of

#: Architectures whose layers are not all of one kind, or attend otherwise: their arguments tell of nothing here.
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
    """Each tensor of it, in its shape; the table was proved on megatron-core's own models."""
    architecture, more = CASES[case]
    relation, sizes = relation_of(config_of(architecture, **more), padded=384)
    args = {**table_of(architecture).args(sizes), "padded_vocab_size": 384}
    expected = told(args)
    assert (expected == {}) == (architecture in UNTOLD)
    assert expected.items() <= relation.b_shapes.items()
    check_args(args, relation.b_shapes, Path("run"))
    for name in expected:
        without = {key: shape for key, shape in relation.b_shapes.items() if key != name}
        with pytest.raises(CorruptError, match="lacks tensors"):
            check_args(args, without, Path("run"))
        with pytest.raises(CorruptError, match="not the shape") as caught:
            check_args(args, {**relation.b_shapes, name: (5, *expected[name])}, Path("run"))
        assert caught.value.fqn == name


def test_arguments_that_are_not_all_there_tell_of_nothing() -> None:
    args = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4}
    assert len(told(args)) == 13
    assert told({**args, "kv_channels": None}) == told({**args, "spec": ["own", "layers"]}) == told({}) == {}


@pytest.mark.parametrize(("often", "sparse"), [(1, {0, 1, 2, 3}), (2, {0, 2}), ([0, 1, 1, 0], {1, 2})])
def test_layers_with_experts_are_counted_as_megatron_lm_does(often: int | list[int], sparse: set[int]) -> None:
    args = {"num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4}
    names = told({**args, "num_experts": 2, "moe_layer_freq": often})
    assert {int(name.split(".")[2]) for name in names if name.endswith(".mlp.router.weight")} == sparse
