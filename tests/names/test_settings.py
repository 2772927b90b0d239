"""`converters/names/megatron/settings.py`, `run_settings.py`, `config_against_args.py`: no setting is ignored."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from ckpt import api
from ckpt.errors import CorruptError, LossError
from ckpt.plan.checkpoint import HUB, MEGATRON, WEIGHT, Checkpoint, TrainingState
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.tensors import Extent, Tensor, Whole
from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.megatron.config_against_args import refuse_another_models
from converters.names.megatron.relation import table_of_checkpoint
from converters.names.megatron.run_settings import names_in
from converters.names.megatron.settings import (
    ALIASES,
    CHANGES,
    COMPARED,
    OPPOSITES,
    changing,
    check_aliases,
    is_off,
    is_run_setting,
    unknown_and_off,
)
from converters.names.megatron.shapes_from_args import model_shapes
from converters.names.megatron.table import Table
from tests.names.test_megatron import config_of, table_of
from tests.support.commands import ckpt

FIELDS = {
    field.name: field
    for kind in (MLATransformerConfig, TransformerConfig, ModelParallelConfig)
    for field in fields(kind)
}
RUNS = ["megatron-lm", "megatron-lm-muon", "megatron-llm-jp/run", "megatron-torch-dcp", "megatron-0.15-fully"]
RUNS += ["megatron-0.17-dp", "megatron-0.18-dp", "megatron-dist-flattened", "megatron-fsdp", "megatron-bridge-run/run"]
#: Fields checked through tensors: other values change names or shapes, so readers and relations refuse them.
BY_TENSORS = names_in(
    """
    add_bias_linear add_qkv_bias ffn_hidden_size qk_layernorm moe_ffn_hidden_size moe_layer_freq mtp_num_layers
    moe_shared_expert_gate moe_shared_expert_intermediate_size gated_linear_unit max_position_embeddings
    linear_attention_freq is_hybrid_model
    """
)
#: Fields without effect unless another, compared field is set.
LATENT = """
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type mscale mscale_all_dim beta_fast
    beta_slow original_max_position_embeddings rotary_scaling_factor
"""
BY_OTHERS: dict[str, dict[str, Any]] = {
    "window_attn_skip_freq": {"window_size": (3, 0)},
    "moe_router_group_topk": {"moe_router_num_groups": 4},
    "moe_router_num_groups": {"moe_router_group_topk": 1},
}
#: Names of fields in messages.
SAID = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
SAID |= dict.fromkeys(("rope_type", "mscale", "mscale_all_dim"), "rotary_scaling_factor")


#: Values to try for fields whose other values may have no effect.
VALUES: dict[str, list[Any]] = {
    "num_query_groups": [9],
    "window_size": [(3, 0), "something"],
    "window_attn_skip_freq": [2],
    "no_rope_freq": [1, [1, 0], "something"],
    "moe_router_num_groups": [4, "something"],
    "moe_router_group_topk": [1, "something"],
    "moe_router_topk_scaling_factor": [2.5],
    "moe_token_dropping": [],  # True is Megatron-DeepSpeed's default
    "moe_router_pre_softmax": [],  # the class's own is True
    "mrope_section": [],  # no effect on text
    "num_moe_experts": [],  # read as num_experts
}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}
YARN |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
#: Extra config entries and their architecture, by name of the model.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3 with YaRN": ("deepseek_v3", {"rope_parameters": YARN}),
    "gpt_neox in parallel": ("gpt_neox", {"use_parallel_residual": True}),
    "llama scaled": ("llama", {"rope_parameters": LLAMA3}),
}


@cache
def model_of(model: str) -> tuple[Table, Sizes]:
    """Return table and sizes for an architecture or a name in `CONFIGS`."""
    architecture, more = CONFIGS.get(model, (model, {}))
    table = table_of(architecture)
    return table, table.family.sizes(config_of(architecture, **more))


def run_of(architecture: str, **recorded: Any) -> tuple[Checkpoint, Table, Sizes]:
    """Return a run of an architecture with the arguments from its config and more."""
    table, sizes = model_of(architecture)
    state = TrainingState(args={**table.args(sizes), **recorded})
    return Checkpoint("run", "megatron", {}, (), namespace=MEGATRON, state=state), table, sizes


#: Models to test fields that other models ignore.
MODELS = {
    **dict.fromkeys(LATENT.split(), "deepseek_v3 with YaRN"),
    **dict.fromkeys(("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"), "nemotron_h"),
    **dict.fromkeys(
        (
            *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads"),
        ),
        "qwen3_next",
    ),
}


def refusal(architecture: str, **recorded: Any) -> str | None:
    try:
        refuse_another_models(*run_of(architecture, **recorded))
    except (CorruptError, LossError) as error:
        return str(error)
    return None


def test_every_field_of_megatron_core_is_classified() -> None:
    assert len(FIELDS) > 250
    assert [name for name in FIELDS if not (name in COMPARED or name in CHANGES or is_run_setting(name))] == [
        "activation_func"
    ] * ("activation_func" in FIELDS and "activation_func" not in CHANGES)
    assert not COMPARED & CHANGES.keys()
    assert not [name for name in (*COMPARED, *CHANGES) if is_run_setting(name)]


def test_code_that_builds_another_model_is_refused_and_hooks_of_a_training_are_not() -> None:
    assert refusal("llama", custom_rm_path="rewards.math", custom_generate_function_path="a.b") is None
    for name in ("custom_model_provider_path", "custom_scale"):
        assert name in (refusal("llama", **{name: "slime_plugins.models.gemma4"}) or "")


def other_values(name: str) -> list[Any]:
    default = FIELDS[name].default
    if default is MISSING or default is None or callable(default):
        return ["something", 7, True, [1, 0]]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [default + 3, default * 2 + 0.5]
    return [f"another-{default}"]


def test_no_field_with_another_value_passes_in_silence() -> None:
    """Random fields and values are refused by name, unless they are settings of the training program."""
    draw = random.Random(40)
    compared = 0
    for name in FIELDS:
        if is_run_setting(name) or name in BY_TENSORS:
            continue
        value = draw.choice([one for one in VALUES.get(name, other_values(name)) if not is_off(one)] or [None])
        if value is None:  # a flag with default True
            continue
        more = BY_OTHERS.get(name, {})
        said = refusal(MODELS.get(name, "qwen3_moe"), **{**more, name: value})
        assert said, (name, value)
        assert SAID.get(name, name) in said or any(one in said for one in more), said
        compared += 1
    assert compared > 45


#: Arguments that make a name in `COMPARED` meaningful: a model and other recorded arguments.
WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "num_key_value_heads": (
        "llama",
        {"num_query_groups": None, "group_query_attention": None, "num_key_value_heads": 1},
    ),
    "num_moe_experts": ("qwen3_moe", {"num_experts": None, "num_moe_experts": 5}),
    "rope_theta": ("llama", {"rotary_base": None, "rope_theta": 10000}),
    "rope_scaling": ("llama", {"rope_scaling": {"rope_type": "default"}}),
    "untie_embeddings_and_output_weights": ("llama", {"padded_vocab_size": 259}),
    "yarn": ("gpt_oss", {"rotary_scaling_factor": None, "yarn": {"rotary_scaling_factor": 32.0}}),
}
#: Each name in `COMPARED` matters to at least one of these models.
DEPENDING = ["llama", "qwen3_moe", *CONFIGS, "gpt_oss", "nemotron_h", "qwen3_next", "qwen2_5_vl", "qwen2_moe"]
DEPENDING += ["qwen3_vl", "gpt2", "megatron-bert"]


def outcome(model: str, recorded: dict[str, Any]) -> Any:
    """Return a run's result: its refusal or notes, and its expected tensors."""
    run, table, sizes = run_of(model, **recorded)
    try:
        said: Any = refuse_another_models(run, table, sizes)
    except (CorruptError, LossError) as error:
        said = str(error)
    return said, model_shapes(run.state.args or {})


def changed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 3]
    if isinstance(value, dict):
        return [dict.fromkeys(value, "another")]
    return [True, 7, 0.25, [1, 0], "another"]


def depending(name: str) -> Iterator[str]:
    for model in [WITH[name][0]] if name in WITH else DEPENDING:
        recorded = WITH.get(name, (model, {}))[1]
        args = run_of(model, **recorded)[0].state.args or {}
        before = outcome(model, recorded)
        assert isinstance(before[0], list), before
        if any(outcome(model, {**recorded, name: value}) != before for value in changed(args.get(name))):
            yield model


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_each_compared_setting_changes_the_outcome_for_some_model(name: str) -> None:
    assert next(depending(name), None)


@pytest.mark.parametrize("value", [3, 0.5, True, "on", [1], {"a": 1}])
def test_an_unknown_setting_is_refused_by_name(value: Any) -> None:
    said = refusal("llama", nobody_has_heard_of_it=value)
    assert said and "nobody_has_heard_of_it" in said and "unknown to ckpt" in said
    assert "--accept-setting nobody_has_heard_of_it" in said or "accept_settings=['nobody_has_heard_of_it']" in said


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_setting_that_is_off_is_named(value: Any) -> None:
    notes = refuse_another_models(*run_of("llama", nobody_has_heard_of_it=value))
    assert notes == ["1 recorded setting unknown to ckpt is off (None, False, 0 or empty): nobody_has_heard_of_it"]


def test_an_accepted_setting_is_ignored_and_named() -> None:
    checkpoint, table, sizes = run_of("llama", nobody_has_heard_of_it=3, softmax_type="off-by-one", rotary_base=7)
    accepted = frozenset({"nobody_has_heard_of_it", "softmax_type", "rotary_base"})
    (note,) = refuse_another_models(replace(checkpoint, accepted=accepted), table, sizes)
    assert note == "ignored (accept_settings): nobody_has_heard_of_it, rotary_base, softmax_type"
    with pytest.raises(CorruptError, match="another model"):
        refuse_another_models(replace(checkpoint, accepted=accepted - {"rotary_base"}), table, sizes)


@pytest.mark.parametrize(
    ("architecture", "recorded", "refused"),
    [
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor 2.5"),
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 1.0}, None),
        ("deepseek_v3", {"moe_router_topk_scaling_factor": 1.0}, "moe_router_topk_scaling_factor 1.0"),
        ("qwen3_moe", {"softmax_type": "off-by-one"}, "softmax_type off-by-one"),
        ("gpt_oss", {"softmax_type": "vanilla"}, "softmax_type vanilla"),
        ("gpt_oss", {"softmax_type": "learnable"}, None),
        ("qwen3_moe", {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, None),
        ("qwen3_moe", {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "sinkhorn"),
        ("qwen3_moe", {"moe_expert_capacity_factor": 1.25}, "moe_expert_capacity_factor 1.25"),
        ("qwen3_moe", {"moe_expert_capacity_factor": -1.0}, None),
        ("qwen3_moe", {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size 32"),
        ("nemotron_h", {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]}, None),
        ("llama", {"spec": ["my.layers", "my_spec"]}, "spec"),
        ("deepseek_v3", {"qk_head_dim": 7}, "qk_head_dim 7"),
        ("nemotron_h", {}, None),
        ("nemotron_h", {"mamba_num_groups": 7}, "mamba_num_groups 7"),
        ("qwen3_next", {}, None),
        ("qwen3_next", {"linear_num_key_heads": 7}, "linear_num_key_heads 7"),
        ("llama", {"mamba_state_dim": 128, "linear_key_head_dim": 128}, None),  # recorded for every model
        ("llama", {"rope_theta": 5000, "rotary_base": None}, "rotary_base 5000"),
        ("llama", {"rope_theta": 10000, "rotary_base": None}, None),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling longrope"),
        ("llama", {"rope_scaling": {"rope_type": "default"}}, None),
        ("llama", {"mtp_num_layers": 2}, "mtp_num_layers 2"),
        ("llama", {"mtp_num_layers": 0}, None),
        ("llama", {"gpt_j_residual": True}, "gpt_j_residual True"),
        ("llama", {"use_parallel_residual": True}, "use_parallel_residual True"),
        ("llama", {"gpt_j_residual": False}, None),
        ("gpt_neox", {}, None),
        ("gpt_neox", {"gpt_j_residual": True}, "use_parallel_residual False"),
        ("gpt_neox in parallel", {}, None),
        ("gpt_neox in parallel", {"gpt_j_residual": None}, None),  # in GPT-NeoX files only the config decides
        ("gpt_neox in parallel", {"gpt_j_residual": False}, "gpt_j_residual False"),
        ("qwen3_moe", {"num_experts": None, "num_moe_experts": 99}, "num_experts 99"),
        ("qwen3_moe", {"num_experts": None, "num_moe_experts": 5}, None),
        ("llama", {"num_query_groups": None, "group_query_attention": None, "num_key_value_heads": 7}, "groups 7"),
        ("llama", {"num_query_groups": None, "group_query_attention": None, "num_key_value_heads": 1}, None),
        ("qwen2_5_vl", {"mrope_section": 7}, "mrope_section 7"),
        ("qwen2_5_vl", {"mrope_section": (2, 1, 1)}, None),
        ("nemotron_h", {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*|-E"}, None),
        ("nemotron_h", {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*EM"}, "hybrid_layer_pattern M*EM"),
        ("nemotron_h", {"hybrid_layer_pattern": "M*-E/M"}, "hybrid_layer_pattern M*-E/M"),
        ("llama", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern M*"),
        ("llama", {"softmax_scale": 6**-0.5}, None),
        ("llama", {"softmax_scale": 0.25}, "softmax_scale 0.25"),
        ("deepseek_v3 with YaRN", {}, None),
        ("deepseek_v3 with YaRN", {"rope_type": "rope"}, "rotary_scaling_factor"),
        ("llama", {"tensorboard_dir": "logs", "wandb_exp_name": "x", "train_iters": 5, "lr": 1e-4, "seed": 1}, None),
    ],
)
def test_what_is_refused_and_what_is_not(architecture: str, recorded: dict[str, Any], refused: str | None) -> None:
    said = refusal(architecture, **recorded)
    assert (said is None) if refused is None else (said is not None and refused in said), said


@pytest.mark.parametrize(
    ("model", "recorded", "wrong"),
    [
        ("qwen3_moe", {"num_experts": 5, "num_moe_experts": 5}, {"num_moe_experts": 99}),
        ("llama", {"rotary_base": 10000, "rope_theta": 10000}, {"rope_theta": 5000}),
        ("llama", {"num_query_groups": 1, "num_key_value_heads": 1}, {"num_key_value_heads": 7}),
        ("gpt_neox in parallel", {"gpt_j_residual": True, "use_parallel_residual": True}, {"gpt_j_residual": False}),
        ("llama", {"apply_layernorm_1p": False}, {"layernorm_zero_centered_gamma": True}),
        ("llama", {}, {"layernorm_epsilon": 0.5}),
        ("nemotron_h", {"hybrid_layer_pattern": "M*|-E"}, {"hybrid_layer_pattern": "M*EM"}),
    ],
)
def test_two_names_of_a_setting_have_one_value(model: str, recorded: dict[str, Any], wrong: dict[str, Any]) -> None:
    """The second name must be checked even if the first agrees with the config."""
    grouped = {"group_query_attention": True} if "num_query_groups" in recorded else {}
    assert refusal(model, **grouped, **recorded) is None
    assert refusal(model, **grouped, **{**recorded, **wrong})


def test_every_pair_of_names_is_refused_by_name() -> None:
    for first, second in ALIASES[:-1]:  # the last one is a flag
        with pytest.raises(LossError, match=f"{first} 1, {second} 2") as caught:
            check_aliases({first: 1, second: 2}, "run")
        assert f"--accept-setting {second}" in (caught.value.hint or "")
        for fine in ({first: 1, second: 1}, {first: 1}, {second: 2}, {first: None, second: 2}):
            check_aliases(fine, "run")
    first, second = ALIASES[-1]
    check_aliases({first: True, second: {"rope_type": "llama3"}}, "run")
    with pytest.raises(LossError, match=f"{first} False, {second} True"):
        check_aliases({first: False, second: True}, "run")
    ((tied, untied),) = OPPOSITES
    check_aliases({tied: True, untied: False}, "run")
    with pytest.raises(LossError, match="two different values"):
        check_aliases({tied: True, untied: True}, "run")


#: YaRN's values under two names, by model, and the names in the refusal.
YARN_TWICE: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"rotary_scaling_factor": 4.0, "yarn_rotary_scaling_factor": 32.0}, "yarn_rotary_scaling_factor 32.0"),
    ("gpt_oss", {"mscale": 0.5, "yarn_mscale": 1.0}, "mscale 0.5, yarn_mscale 1.0"),
    ("gpt_oss", {"mscale_all_dim": 0.5, "yarn_mscale_all_dim": 0}, "mscale_all_dim 0.5, yarn_mscale_all_dim 0"),
    ("gpt_oss", {"yarn": {"beta_fast": 32.0}, "yarn_beta_fast": 7.0}, "yarn_beta_fast 7.0, yarn.beta_fast 32.0"),
    ("gpt_oss", {"yarn": {"rotary_scaling_factor": 32.0}, "rotary_scaling_factor": 7.0}, "yarn.rotary_scaling_factor"),
    ("gpt_oss", {"beta_slow": 7.0}, "beta_slow 7.0, yarn_beta_slow 1.0"),
    ("gpt_oss", {"original_max_position_embeddings": 7}, "yarn_original_max_position_embeddings 4096"),
    *(
        ("deepseek_v3 with YaRN", {f"yarn_{name}": 9}, f", yarn_{name} 9")
        for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    ),
    ("deepseek_v3 with YaRN", {"yarn": {"rotary_scaling_factor": 9.0}}, "yarn.rotary_scaling_factor 9.0"),
    ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_scaling.type linear"),
    ("llama", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "rope_scaling.rope_theta 500000.0"),
    ("llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor 0.5"),
    ("llama scaled", {"rope_scaling": LLAMA3, "rope_scaling_factor": 16.0}, "rope_scaling.factor 8.0"),
]


@pytest.mark.parametrize(("model", "recorded", "names"), YARN_TWICE, ids=str)
def test_positions_recorded_under_two_names_have_one_value(model: str, recorded: dict[str, Any], names: str) -> None:
    said = refusal(model, **recorded)
    assert said and "two different values for one setting" in said and names in said, said


def test_the_wrong_one_of_two_names_is_ignored_as_asked() -> None:
    for wrong, recorded in (
        ("rotary_scaling_factor", {"rotary_scaling_factor": 4.0, "yarn_rotary_scaling_factor": 32.0}),
        ("yarn_beta_fast", {"yarn": {"beta_fast": 32.0}, "yarn_beta_fast": 7.0}),
    ):
        checkpoint, table, sizes = run_of("gpt_oss", **recorded)
        with pytest.raises(LossError, match="two different values"):
            refuse_another_models(checkpoint, table, sizes)
        notes = refuse_another_models(replace(checkpoint, accepted=frozenset({wrong})), table, sizes)
        assert notes == [f"ignored (accept_settings): {wrong}"]


def test_overrides_of_ms_swift_are_compared() -> None:
    for overrides in ({"rotary_base": 5}, '{"rotary_base": 5}'):
        assert "rotary_base 5" in (refusal("llama", megatron_extra_kwargs=overrides) or "")
    assert "softmax_type" in (refusal("llama", megatron_extra_kwargs={"softmax_type": "off-by-one"}) or "")
    assert "nobody_has" in (refusal("llama", megatron_extra_kwargs={"nobody_has_heard_of_it": 3}) or "")
    for harmless in (None, "", "{}", {}, {"rotary_base": 10000, "recompute_granularity": "full"}):
        assert refusal("llama", megatron_extra_kwargs=harmless) is None
    checkpoint, table, sizes = run_of("llama", megatron_extra_kwargs={"rotary_base": 5})
    refuse_another_models(replace(checkpoint, accepted=frozenset({"megatron_extra_kwargs"})), table, sizes)


#: The defaults that Megatron-LM records for every run.
LATENTS_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
OPTIONS_DEFAULTS = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def test_defaults_of_names_that_are_not_read_are_no_second_value() -> None:
    fields = {"yarn_rotary_scaling_factor": 32.0, "yarn_mscale": None, "yarn_mscale_all_dim": None}
    assert refusal("gpt_oss", **fields, **LATENTS_DEFAULTS, **OPTIONS_DEFAULTS) is None
    of_swift = {"rope_type": "yarn", "type": "yarn", "factor": 32.0, "truncate": False}
    of_swift |= {"original_max_position_embeddings": 4096}
    defaults = {**LATENTS_DEFAULTS, **OPTIONS_DEFAULTS, "yarn_beta_fast": None, "yarn_beta_slow": None}
    defaults |= {"position_embedding_type": "rope", "yarn_correction_range_round_to_int": None}
    assert refusal("gpt_oss", rope_scaling=of_swift, yarn_original_max_position_embeddings=None, **defaults) is None
    sections = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 1, 1]}
    assert refusal("qwen2_5_vl", rope_scaling=sections, mrope_section=(2, 1, 1)) is None
    assert refusal("llama", **OPTIONS_DEFAULTS, **LATENTS_DEFAULTS, rope_scaling={"type": "default"}) is None


@pytest.mark.parametrize(
    ("model", "scaling", "name"),
    [
        *(("llama scaled", {**LLAMA3, name: 2.0}, name) for name in ("low_freq_factor", "high_freq_factor")),
        ("llama scaled", {**LLAMA3, "original_max_position_embeddings": 2}, "original_max_position_embeddings"),
        ("llama scaled", {**LLAMA3, "nobody_has_heard_of_it": 2}, "nobody_has_heard_of_it"),
        ("deepseek_v3 with YaRN", {**YARN, "beta_fast": 9}, "beta_fast"),
        ("deepseek_v3 with YaRN", {**YARN, "attention_factor": 3.0}, "attention_factor"),
        ("llama", {"rope_type": "default", "factor": 4.0}, "factor"),
    ],
)
def test_every_entry_of_a_recorded_scaling_is_compared(model: str, scaling: dict[str, Any], name: str) -> None:
    same = {**scaling, name: (LLAMA3 | YARN if model == "llama" else CONFIGS[model][1]["rope_parameters"]).get(name)}
    assert model == "llama" or refusal(model, rope_scaling=same) is None
    said = refusal(model, rope_scaling=scaling)
    assert said and f"rope_scaling.{name} {scaling[name]}" in said and "another model" in said, said


@pytest.mark.parametrize("scaling", [True, "yarn", '{"factor": 4}'])
def test_a_scaling_without_entries_is_another_models(scaling: object) -> None:
    assert "rope_scaling" in (refusal("llama", rope_scaling=scaling) or "")


def test_yarns_scale_of_attention_without_its_positions_is_another_models() -> None:
    assert "yarn_rotary_scaling_factor 4.0" in (refusal("llama", yarn_rotary_scaling_factor=4.0) or "")
    assert refusal("llama", yarn_rotary_scaling_factor=1.0) is None


DEFAULT, LINEAR = {"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "linear", "factor": 4.0}
YARN_OF_TEXT = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"rope_parameters": DEFAULT, "rope_theta": 5e5}, "rope_theta 500000.0, rope_parameters.rope_theta 10000.0"),
        ({"rope_scaling": LINEAR, "rope_parameters": DEFAULT}, "rope_scaling.rope_type linear"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_type default"),
        ({"rope_parameters": {**DEFAULT, "type": "linear"}}, "rope_parameters.type linear"),
        ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5}, "factor 0.5"),
        ({"rope_scaling": YARN_OF_TEXT, "original_max_position_embeddings": 32}, "original_max_position_embeddings 32"),
        ({"rope_scaling": {**LINEAR, "factor": 2.0}, "rope_parameters": LINEAR}, "rope_scaling.factor 2.0"),
        ({"rope_parameters": DEFAULT, "rope_theta": 10000}, None),
        ({"rope_scaling": None, "rope_parameters": LINEAR, "rope_theta": 10000}, None),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}, "rope_theta": 10000}, None),
        ({"rope_scaling": {"type": "su", "rope_type": "longrope"}}, None),
        ({"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": LINEAR}, "rope_theta": 5}, None),
    ],
    ids=str,
)
def test_a_config_with_two_values_of_a_rotary_parameter_is_refused(entries: dict[str, Any], names: str | None) -> None:
    config = {key: value for key, value in config_of("llama").items() if not key.startswith("rope_")} | entries
    checkpoint = Checkpoint("run", "hf", {}, (), namespace=HUB, config=config)
    if names is None:
        table_of_checkpoint(checkpoint)
        return
    with pytest.raises(LossError, match="the config has two different values for one setting") as refused:
        table_of_checkpoint(checkpoint)
    assert names in str(refused.value) and "--config" in str(refused.value.hint)


def test_the_length_before_scaling_is_transformers_own() -> None:
    """Transformers 5 prefers the entry outside, and falls back to the model's length."""
    from transformers import LlamaConfig

    scaling = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    for entries in ({}, {"original_max_position_embeddings": 32}):
        raw = {"max_position_embeddings": 64, **entries}
        live = LlamaConfig(**raw, rope_parameters=dict(scaling))
        live.standardize_rope_params()  # as the model's rotary positions do
        assert Config({**raw, "rope_parameters": scaling}).rope == live.rope_parameters


def test_a_scale_of_attention_that_megatron_does_not_compute_is_refused() -> None:
    table = table_of("gpt_oss")
    for factor, fits in ((0.1 * math.log(32) + 1, True), (3.0, False)):
        scaling = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "attention_factor": factor}
        sizes = table.family.sizes({**config_of("gpt_oss"), "rope_parameters": scaling})
        if fits:
            assert table.args(sizes)["rotary_scaling_factor"] == 32.0
            continue
        with pytest.raises(LossError, match="scales YaRN's attention"):
            table.args(sizes)


def test_the_pattern_of_predicted_layers_is_refused_if_there_are_any() -> None:
    pattern = {"mtp_hybrid_override_pattern": "M*"}
    assert refusal("nemotron_h", **pattern) is None
    checkpoint, table, sizes = run_of("nemotron_h", **pattern, mtp_num_layers=1)
    source = Whole(Extent.contiguous("model.bin", 0, BFLOAT16, (1,)))
    layer = Tensor("mtp.layers.0.norm", WEIGHT, BFLOAT16, (1,), source)
    with pytest.raises(LossError, match="mtp_hybrid_override_pattern"):
        refuse_another_models(replace(checkpoint, tensors={layer.key: layer}), table, sizes)


def test_a_run_of_megatron_is_not_taken_for_a_parallel_residual() -> None:
    checkpoint, table, sizes = run_of("gpt_neox in parallel")
    args = {name: value for name, value in (checkpoint.state.args or {}).items() if name != "gpt_j_residual"}
    run = replace(checkpoint, state=replace(checkpoint.state, args=args))
    with pytest.raises(CorruptError, match="no gpt_j_residual, recorded by the run"):
        refuse_another_models(run, table, sizes)
    refuse_another_models(replace(run, accepted=frozenset({"gpt_j_residual"})), table, sizes)


@pytest.mark.parametrize(
    ("found", "recorded", "passes"),
    [
        (2, {"mtp_num_layers": 2}, True),
        (1, {"mtp_num_layers": 2}, False),
        (1, {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, True),
        (0, {"mtp_num_layers": 1, "mtp_use_repeated_layer": True}, False),
    ],
)
def test_recorded_layers_of_multi_token_prediction_are_there(
    found: int, recorded: dict[str, Any], passes: bool
) -> None:
    checkpoint, table, sizes = run_of("llama", **recorded)
    names = [f"mtp.layers.{number}.{module}.weight" for number in range(found) for module in ("enorm", "hnorm")]
    source = Whole(Extent.contiguous("model.bin", 0, BFLOAT16, (1,)))
    tensors = {(name, WEIGHT): Tensor(name, WEIGHT, BFLOAT16, (1,), source) for name in names}
    run = replace(checkpoint, tensors=tensors)
    try:
        refuse_another_models(run, table, sizes)
    except (CorruptError, LossError) as error:
        assert ("multi-token prediction" in str(error)) is not passes  # a config can't express a repeated layer
    else:
        assert passes


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "name", ["rotary_scaling_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]
)
def test_yarn_is_compared_however_a_run_records_it(name: str, together: bool) -> None:
    """A run records YaRN in one argument, or as fields in megatron-core's config."""
    args = run_of("gpt_oss")[0].state.args or {}
    fields = {
        one: args.get(f"yarn_{one}", args.get(one))
        for one in ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    }

    def recorded(fields: dict[str, Any]) -> dict[str, Any]:
        given = {"yarn": fields} if together else {f"yarn_{one}": value for one, value in fields.items()}
        return {"rotary_scaling_factor": None, **given}

    assert refusal("gpt_oss", **recorded(fields)) is None
    assert name in (refusal("gpt_oss", **recorded({**fields, name: fields[name] * 2})) or "")


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_are_not_refused(name: str, fixtures: Path) -> None:
    args = api.open(fixtures / name).state.args or {}
    assert len(args) > 70
    assert changing(args, {}) == {}
    assert unknown_and_off(args) == []


def test_each_option_in_the_hint_on_two_values_works(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "megatron-llm-jp/run")
    config = fixtures / "megatron-llm-jp/llm-jp/llm-jp-4-moe"
    args = source.state.args or {}
    changed = {"num_experts": args["num_experts"], "num_moe_experts": args["num_experts"] + 1}
    run = replace(source, state=replace(source.state, args={**args, **changed}))
    api.plan(run, "megatron-dist").run(tmp_path / "run")
    command = ("convert", tmp_path / "run", "hf", "--config", config)
    done = ckpt(*command, "-o", tmp_path / "hub")
    assert done.code == LossError.exit_code, done.err
    names = ("num_experts", "num_moe_experts")
    assert f"hint: {' or '.join(f'--accept-setting {name}' for name in names)} ignores the wrong one" in done.err
    ended = {name: ckpt(*command, "-o", tmp_path / name, "--accept-setting", name) for name in names}
    assert "two different values" not in ended["num_experts"].err + ended["num_moe_experts"].err
    assert ended["num_moe_experts"].code == 0, ended["num_moe_experts"].err


def test_the_refusal_as_it_is_printed(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "megatron-llm-jp/run")
    config = fixtures / "megatron-llm-jp/llm-jp/llm-jp-4-moe"
    changed = {"softmax_type": "off-by-one", "new_thing": 3}
    run = replace(source, state=replace(source.state, args={**(source.state.args or {}), **changed}))
    api.plan(run, "megatron-dist").run(tmp_path / "run")
    command = ("convert", tmp_path / "run", "hf", "-o", tmp_path / "hub", "--config", config)
    done = ckpt(*command)
    assert done.code == LossError.exit_code
    assert (
        "error: the model's config can't hold some recorded settings, and they change the model's results" in done.err
    )
    assert "found: softmax_type off-by-one, new_thing 3 (unknown to ckpt)" in done.err
    hint = "--accept-setting softmax_type --accept-setting new_thing"
    assert f"hint: {hint} ignores them, in ckpt convert, merge-lora, verify, diff, hash and mount" in done.err
    assert ckpt(*command, *hint.split()).code == 0
