"""`converters/names/megatron/relation.py`, `table.py`, `rows.py`, `args.py`, `unsupported.py`, `centered_norms.py`.

Also `architectures/deepseek_v3.py`, `architectures/nemotron_h.py`, `model/axes.py`, `model/spelling.py` and
`model/splits.py`: tables, manual rows, padding and errors. Slow tests compare megatron-core's own names and logits.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.containers.torchfile.write import torch_file
from ckpt.errors import CkptError, CorruptError, LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import HUB, MEGATRON, OWN, TRANSFORMERS, WEIGHT, Checkpoint, Layout, ParamGroup, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.planner import check_source
from ckpt.plan.relation import Relation
from ckpt.plan.tensors import ZEROS, Extent, Shape, Tensor, Whole
from ckpt.state.naming import to_namespace
from converters.megatron.chunks import describe_model
from converters.megatron.read import folder_name
from converters.megatron.write import ModelFiles
from converters.names.families import tables as families
from converters.names.families.composites import COMPOSITES
from converters.names.families.rows import Sizes
from converters.names.megatron.model.splits import split_of
from converters.names.megatron.relation import architectures
from converters.names.megatron.rows import MegatronRow, parse
from converters.names.megatron.table import Table
from converters.names.megatron.unsupported import MISSING
from tests.support import commands
from tests.support.engines import fork
from tests.support.images import TEXT_ALONE
from tests.support.megatron_logits import auto_class, random_model, save
from tests.support.tiny_sizes import tiny_sizes
from tests.support.twins import SAME_NAMES, TWINS, twin_of
from train.config import ARCHITECTURES as TRAINED

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

#: Cases for the logits: architecture, and changes to the trainer's tiny config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1": (
        "llama",
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-pre-softmax": ("qwen3_moe", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss": ("gpt_oss", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "deepseek_v3": ("deepseek_v3", {"num_nextn_predict_layers": 1}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            "max_position_embeddings": 2560,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek_v3-whole-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "seed_oss": ("seed_oss", {}),
    "ministral": ("ministral", {"sliding_window": 5}),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1]}),
    "arcee": ("arcee", {}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "glm": ("glm", {}),
    "ernie4_5": ("ernie4_5", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-normed": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-pre-softmax": ("qwen3_next", {"norm_topk_prob": False}),
    "qwen3_next-prediction": (
        "qwen3_next",
        {"num_nextn_predict_layers": 1, "layer_types": ["linear_attention", *["full_attention"] * 2]},
    ),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_text-prediction": (
        "qwen3_5_text",
        {"mtp_num_hidden_layers": 1, "layer_types": ["linear_attention", *["full_attention"] * 2]},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-dense": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "glm4_moe": ("glm4_moe", {"num_nextn_predict_layers": 1}),
    "glm4_moe-norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": ("deepseek_v2", {}),
    "nemotron": ("nemotron", {}),
    "nemotron-biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("jais2", {}),
    "helium": ("helium", {"head_dim": 8}),
    "cwm": ("cwm", {"sliding_window": 5}),
    "internlm3": ("internlm3", {}),
    "iquestcoder": ("iquestcoder", {}),
    "persimmon": ("persimmon", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "youtu": ("youtu", {}),
    "youtu-whole-queries": ("youtu", {"q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6}),
    "dots1": ("dots1", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}),
    "solar_open": ("solar_open", {}),
    "exaone_moe": ("exaone_moe", {}),
    "hy_v3": ("hy_v3", {"num_nextn_predict_layers": 1}),
    "flint": ("flint", {}),
    "aria_text": ("aria_text", {}),
    "bailing_moe": ("bailing_moe", {"use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "bailing_moe_v2": ("bailing_moe_v2", {"use_qk_norm": False}),
    "chatglm": ("chatglm", {}),
    "baichuan": ("baichuan", {"num_key_value_heads": 5}),
    "exaone": ("exaone", {}),
    "kimi_k2": ("kimi_k2", {"num_nextn_predict_layers": 1}),
    "mimo": ("mimo", {"num_nextn_predict_layers": 2, "tie_word_embeddings": False}),
    "deepseek_v2-whole-queries": ("deepseek_v2", {"q_lora_rank": None, "routed_scaling_factor": 2.0}),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_vl-tied": ("qwen2_vl", {"tie_word_embeddings": True}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-prediction": (
        "qwen3_5",
        {
            "text_config": {
                **tiny_sizes("qwen3_5")["text_config"],
                "mtp_num_hidden_layers": 1,
                "layer_types": ["linear_attention", *["full_attention"] * 2],
            }
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "llava": ("llava", {}),
    "llava_next": ("llava_next", {}),
    "llava_onevision": ("llava_onevision", {}),
    "internvl": ("internvl", {}),
    "mistral3": ("mistral3", {}),
    "glm4v_moe": ("glm4v_moe", {}),
    "megatron-bert": ("megatron-bert", {}),
}
SEEING = [name for name, (architecture, _) in CASES.items() if architecture in COMPOSITES]
ARCHITECTURES = sorted({architecture for architecture, _ in CASES.values()})

#: Another order of fp32 sums with tens of products: a few units in the last place of the largest logit.
TOLERANCE = 2e-6


def config_of(architecture: str, **more: Any) -> dict[str, Any]:
    from transformers import AutoConfig

    made = AutoConfig.for_model(twin_of(architecture), **{**tiny_sizes(architecture), **more}).to_dict()
    own = TWINS[architecture].config(architecture, made) if architecture in TWINS else made
    return json.loads(json.dumps(own))


def table_of(architecture: str) -> Table:
    return import_module(f"converters.names.megatron.architectures.{architecture.replace('-', '_')}").TABLE


def without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def answer_of(config: Mapping[str, Any], architecture: str) -> tuple[dict[str, Any], Any]:
    """Return Megatron's arguments and all shapes. Drop arguments with equal meaning or without a layer."""
    table = table_of(architecture)
    sizes = table.family.sizes(config)
    args = {
        name: None if name.startswith("moe_router_") and value == 1 else value
        for name, value in table.args(sizes).items()
    }
    dense = {} if len(sizes.sparse) < sizes.num_layers else {"ffn_hidden_size": None}
    return args | dense, (sizes.top, sizes.layers, sizes.predicted, sizes.tied)


def relation_of(config: Mapping[str, Any], padded: int | None = None) -> tuple[Relation, Sizes]:
    table = table_of(config["model_type"])
    sizes = table.family.sizes(config)
    return table.relation(sizes, padded or sizes.dims["v"], {}), sizes


def described(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None, namespace: str = HUB) -> Checkpoint:
    """Return a checkpoint without stored data, for tests that only need descriptions."""

    def tensor(name: str, shape: Shape) -> Tensor:
        return Tensor(name, WEIGHT, BFLOAT16, shape, Whole(Extent.contiguous(f"{name}.bin", 0, BFLOAT16, shape)))

    tensors = {(name, WEIGHT): tensor(name, shape) for name, shape in shapes.items()}
    return Checkpoint("run", "test", tensors, (), config=config, namespace=namespace)


def hub_of(config: Mapping[str, Any]) -> Checkpoint:
    return described(relation_of(config)[0].a_shapes, config)


def saved(folder: Path, architecture: str, **more: Any) -> dict[str, torch.Tensor]:
    """Save a random model with transformers and return its tensors."""
    save(random_model(architecture, more), folder, architecture)
    return load_file(folder / "model.safetensors")


def arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(checkpoint.state.args or {})


def moved(folder: Path, **layout: int) -> Checkpoint:
    return to_namespace(api.open(folder), MEGATRON, Layout(**layout))


def refused(error: type[CkptError], checkpoint: Checkpoint, namespace: str = MEGATRON) -> CkptError:
    with pytest.raises(error) as caught:
        to_namespace(checkpoint, namespace, Layout())
    assert "Traceback" not in str(caught.value)
    return caught.value


class TestTables:
    def test_every_table_is_tested(self) -> None:
        assert list(architectures()) == ARCHITECTURES

    @pytest.mark.parametrize("case", CASES)
    def test_the_inverse_is_mechanical_and_both_sides_are_tiled(self, case: str) -> None:
        architecture, more = CASES[case]
        relation, sizes = relation_of(config_of(architecture, **more), padded=384)
        relation.check()
        relation.inverse().check()
        assert relation.inverse().inverse() == relation
        assert relation.b_shapes[EMBEDDING] == (384, sizes.dims["h"])

    @pytest.mark.parametrize("case", CASES)
    def test_every_tensor_of_megatrons_has_a_way_to_be_split(self, case: str) -> None:
        architecture, more = CASES[case]
        relation, _ = relation_of(config_of(architecture, **more))
        assert [name for name in relation.b_shapes if split_of(name) is None] == []

    def test_a_line_is_a_row_for_each_alternative(self) -> None:
        line = "mlp.linear_fc1.[weight|bias]    mlp.[gate|up]_proj.[weight|bias]    joined"
        assert parse(line, "layer.") == (
            MegatronRow("layer.mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "joined"),
            MegatronRow("layer.mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), "joined"),
        )

    def test_every_tensor_of_the_hubs_has_one_row(self) -> None:
        table = table_of("llama")
        sizes = table.family.sizes(config_of("llama"))
        last = table.dense.strip().splitlines()[-1]
        with pytest.raises(LossError, match="no place") as caught:
            replace(table, dense=table.dense.replace(last, "")).relation(sizes, 384, {})
        assert caught.value.fqn == "model.layers.0.mlp.down_proj.weight"
        twice = replace(table, dense=f"{table.dense}\n{last.replace('fc2', 'fc3')}").relation(sizes, 384, {})
        with pytest.raises(LossError, match="exactly once"):
            twice.check()

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_link_less_is_a_loss(self, architecture: str) -> None:
        relation, _ = relation_of(config_of(architecture))
        for number in range(0, len(relation.links), 7):
            links = relation.links[:number] + relation.links[number + 1 :]
            with pytest.raises(LossError, match="exactly once"):
                replace(relation, links=links).check()

    @pytest.mark.parametrize("case", CASES)
    def test_there_and_back_every_tensor_is_the_same_bits(self, case: str, tmp_path: Path) -> None:
        architecture, more = CASES[case]
        saved(tmp_path / "hub", architecture, **more)
        source = api.open(tmp_path / "hub")
        there = to_namespace(source, MEGATRON, Layout(tp=2))
        assert there.tensors[EMBEDDING, WEIGHT].shape[0] == 512
        back = to_namespace(there, HUB)
        assert back.ties == source.ties
        assert {fqn for fqn, _ in back.tensors} == {fqn for fqn, _ in source.tensors}
        assert api.verify(source, back).equal


class TestHybrids:
    """Gated delta nets and gated attention. The tests compute the arrangement again in torch."""

    def test_queries_and_gates_change_places_by_query_group(self, tmp_path: Path) -> None:
        hub, there = saved(tmp_path, "qwen3_next"), moved(tmp_path)
        q, k, v = (hub[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
        heads = q.reshape(3, 2, 2, 16, 36)  # query groups, heads in each, queries and gates
        keys, values = k.reshape(3, 16, 36), v.reshape(3, 16, 36)
        groups = [
            torch.cat([*heads[group, :, 0], *heads[group, :, 1], keys[group], values[group]]) for group in range(3)
        ]
        assert torch.equal(there["decoder.layers.1.self_attention.linear_qkv.weight"][...], torch.cat(groups))

    def test_sections_of_a_delta_net_come_out_of_its_key_heads(self, tmp_path: Path) -> None:
        hub, there = saved(tmp_path, "qwen3_next"), moved(tmp_path)
        qkvz, ba = (hub[f"model.layers.0.linear_attn.in_proj_{part}.weight"] for part in ("qkvz", "ba"))
        by_head = [*qkvz.reshape(2, 52, 36).split([5, 5, 21, 21], 1), *ba.reshape(2, 6, 36).split([3, 3], 1)]
        expected = torch.cat([part.reshape(-1, 36) for part in by_head])
        assert torch.equal(there["decoder.layers.0.self_attention.in_proj.weight"][...], expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_gated_norm_is_less_one_as_torch_computes_it(self, dtype: torch.dtype, tmp_path: Path) -> None:
        hub = {name: tensor.to(dtype) for name, tensor in saved(tmp_path, "qwen3_5_text").items()}
        name = "model.layers.0.linear_attn.norm.weight"
        hub[name] = torch.tensor([0.5, 2.0, 1.0, 0.3, -1.7, 3.0, 1.0078125]).to(dtype)
        save_file(hub, tmp_path / "model.safetensors", {"format": "pt"})
        there = moved(tmp_path)
        less = there["decoder.layers.0.self_attention.out_norm.weight"][...]
        assert torch.equal(less, hub[name] - 1)
        norms = [hub[one] for one in hub if one.endswith("linear_attn.norm.weight")]
        lost = sum(int(((one - 1) + 1 != one).sum()) for one in norms)
        note = next(note for note in there.notes if "2 gated norms are one less" in note)
        assert note.endswith(f": {lost} values can't be restored" if lost else ": exact here")
        back = to_namespace(there, HUB)
        assert torch.equal(back[name][...], (hub[name] - 1) + 1)
        exact = (hub[name] >= 0.5) & (hub[name] <= 2)
        assert torch.equal(back[name][...][exact], hub[name][exact])

    def test_masters_are_less_one_and_states_are_not(self) -> None:
        name = "model.layers.0.linear_attn.norm.weight"
        hub = hub_of(config_of("qwen3_next"))
        weight = hub.tensors[name, WEIGHT]
        more = {(name, role): weight._replace(role=role, dtype=FLOAT32) for role in ("master", "exp_avg")}
        rest = {
            (fqn, role): tensor._replace(role=role, dtype=FLOAT32)
            for (fqn, _), tensor in hub.tensors.items()
            for role in ("master", "exp_avg")
        }
        there = to_namespace(replace(hub, tensors={**hub.tensors, **rest, **more}), MEGATRON, Layout())
        norm = "decoder.layers.0.self_attention.out_norm.weight"
        assert {path.split(":")[-2] for path in there.computed} == {WEIGHT, "master"}
        assert next(there.tensors[norm, "exp_avg"].fragments()).extent.path == f"{name}.bin"

    @pytest.mark.parametrize(("architecture", "impl"), [("qwen3_next", "local"), ("nemotron_h", "local")])
    def test_layers_of_megatron_cores_own_are_refused(self, architecture: str, impl: str) -> None:
        there = to_namespace(hub_of(config_of(architecture)), MEGATRON, Layout())
        with pytest.raises(LossError, match="only with Transformer Engine"):
            describe_model(there, Layout(transformer_impl=impl))

    def test_mamba_has_no_chunks(self) -> None:
        there = to_namespace(hub_of(config_of("nemotron_h")), MEGATRON, Layout())
        with pytest.raises(UsageError, match="one chunk on each pipeline rank"):
            describe_model(there, Layout(pp=2, vpp=2))

    def test_norms_that_are_not_around_zero_are_refused(self) -> None:
        there = to_namespace(hub_of(config_of("qwen3_5_text")), MEGATRON, Layout())
        args = {**(there.state.args or {}), "apply_layernorm_1p": False}
        with pytest.raises(LossError, match="not zero-centered"):
            to_namespace(replace(there, state=replace(there.state, args=args)), HUB)

    def test_mamba_deals_layers_by_their_number_alone(self) -> None:
        there = to_namespace(hub_of(config_of("nemotron_h")), MEGATRON, Layout())
        layouts = ({"pipeline_model_parallel_layout": "Ettt|tL"}, {"account_for_loss_in_pipeline_split": True})
        for layout, pp in zip(layouts, (2, 5), strict=True):
            with pytest.raises(UsageError, match="only by their number"):
                describe_model(there, Layout(pp=pp, **layout))
        assert describe_model(there, Layout(pp=2, decoder_first_pipeline_num_layers=1)).stages.first == 1

    @pytest.mark.parametrize(
        ("architecture", "sizes", "named"),
        [
            ("qwen3_next", {"linear_key_head_dim": 6}, "linear_num_key_heads 2"),
            ("nemotron_h", {"ssm_state_size": 6}, "mamba_num_groups 2"),
        ],
    )
    def test_heads_and_groups_are_not_cut_though_their_rows_divide(
        self, architecture: str, sizes: dict[str, Any], named: str
    ) -> None:
        there = to_namespace(hub_of(config_of(architecture, **sizes)), MEGATRON, Layout(tp=3))
        with pytest.raises(UsageError, match="packed layer's heads or groups") as caught:
            describe_model(there, Layout(tp=3))
        assert named in str(caught.value.found)

    def test_prediction_of_another_kind_than_the_last_layer_is_refused(self) -> None:
        with pytest.raises(LossError, match="like the last layer"):
            relation_of(config_of("qwen3_next", num_nextn_predict_layers=1))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("conv_kernel", 3), ("use_bias", True), ("layer_norm_epsilon", 1e-6), ("moe_latent_size", 8)],
    )
    def test_what_a_mamba_mixer_has_no_argument_for_is_refused(self, name: str, value: Any) -> None:
        config = config_of("nemotron_h")
        error = refused(LossError, described(hub_of(config).shapes, {**config, name: value}))
        assert name in str(error.found)

    def test_nothing_is_known_of_adapters(self) -> None:
        from converters.names.megatron.adapter import Modules

        with pytest.raises(LossError, match="several layer kinds"):
            Modules.of(hub_of(config_of("qwen3_next")))


class TestWhatMegatronLacks:
    @pytest.mark.parametrize("model_type", MISSING)
    def test_it_is_refused_by_name(self, model_type: str) -> None:
        for namespace, there in ((HUB, MEGATRON), (MEGATRON, HUB)):
            error = refused(LossError, described({EMBEDDING: (8, 4)}, {"model_type": model_type}, namespace), there)
            assert MISSING[model_type] in str(error) and model_type in str(error)

    def test_it_is_of_architectures_that_transformers_has_and_ckpt_has_no_table_for(self) -> None:
        from transformers import CONFIG_MAPPING

        assert MISSING.keys() <= set(CONFIG_MAPPING)
        assert not MISSING.keys() & set(architectures())

    def test_norms_inside_latent_attention_have_another_epsilon(self) -> None:
        """Whatever the config states, transformers' class uses 1e-6 there. Megatron has one epsilon for all norms."""
        for epsilon, said in ((1e-6, 0), (1e-5, 1)):
            config = config_of("deepseek_v3", rms_norm_eps=epsilon)
            there = to_namespace(hub_of(config), MEGATRON, Layout())
            assert sum("rms_norm_eps, 1e-05" in note for note in there.notes) == said

    def test_multi_token_prediction_that_no_table_knows_is_left_out_and_named(self) -> None:
        config = config_of("exaone_moe")
        shapes = {**relation_of(config)[0].a_shapes, "mtp.fc.weight": (35, 70)}
        notes = to_namespace(described(shapes, config), MEGATRON, Layout()).notes
        assert any("1 tensor for multi-token prediction" in note and "mtp.fc.weight" in note for note in notes)


class TestTrainingState:
    """Optimizer states moved between runs of transformers and Megatron."""

    @pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in TWINS or a in SAME_NAMES])
    def test_param_groups_are_in_the_order_of_transformers_modules(self, architecture: str) -> None:
        """An engine locates parameters in a ZeRO partition only by this order."""
        from transformers import AutoConfig

        with torch.device("meta"):
            config = AutoConfig.for_model(twin_of(architecture), **tiny_sizes(architecture))
            registered = [name for name, _ in auto_class(architecture).from_config(config).named_parameters()]
        hub = hub_of(config_of(architecture))
        there = to_namespace(to_namespace(hub, TRANSFORMERS), MEGATRON, Layout())
        names = tuple(fqn for fqn, role in there.tensors if role == WEIGHT)
        groups = (ParamGroup(names[::2], {"lr": 1.0}), ParamGroup(names[1::2], {"lr": 2.0}))
        back = to_namespace(replace(there, state=TrainingState(param_groups=groups)), TRANSFORMERS)
        assert {fqn for group in back.state.param_groups for fqn in group.fqns} == set(registered)
        for group in back.state.param_groups:
            assert list(group.fqns) == [name for name in registered if name in set(group.fqns)]

    @pytest.mark.parametrize("count", [{"global_samples": 96}, {"train_state": {"step": 4, "sequences": 96}}])
    def test_schedule_and_data_go_on_where_they_were(self, count: dict[str, Any]) -> None:
        config = config_of("llama")
        hub = replace(hub_of(config), state=TrainingState(step=4, **count, scalars={"step": {OUTPUT: 4.0}}))
        state = to_namespace(hub, MEGATRON, Layout()).state
        assert state.args is not None
        assert state.args["consumed_train_samples"] == 96
        assert state.opt_param_scheduler["num_steps"] == 96
        # The next run's options set the schedule. megatron-core compares them or uses its own.
        assert {value for name, value in state.opt_param_scheduler.items() if name != "num_steps"} == {None}

    def test_sequences_seen_and_the_peak_of_the_rate_come_back(self) -> None:
        config = config_of("llama")
        there = to_namespace(hub_of(config), MEGATRON, Layout())
        args = {**arguments(there), "consumed_train_samples": 96}
        groups = (ParamGroup(("decoder.final_layernorm.weight",), {"lr": 0.5, "max_lr": 1.0}),)
        state = to_namespace(replace(there, state=TrainingState(args=args, param_groups=groups)), HUB).state
        assert state.global_samples == 96
        assert state.param_groups[0].options == {"lr": 0.5, "max_lr": 1.0, "initial_lr": 1.0}


class TestArrangement:
    """Row order, compared with lists written by hand."""

    def test_queries_keys_and_values_by_group(self, tmp_path: Path) -> None:
        """4 heads of 2 in 2 groups: q0 q1 k0 v0 q2 q3 k1 v1, two rows each."""
        more = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_hidden_layers": 1}
        hub = saved(tmp_path, "qwen2", **more)
        there = moved(tmp_path)
        for kind in ("weight", "bias"):
            q, k, v = (hub[f"model.layers.0.self_attn.{x}_proj.{kind}"] for x in "qkv")
            expected = [q[0], q[1], q[2], q[3], k[0], k[1], v[0], v[1], q[4], q[5], q[6], q[7], k[2], k[3], v[2], v[3]]
            found = there[f"decoder.layers.0.self_attention.linear_qkv.{kind}"][...]
            assert torch.equal(found, torch.stack(expected))

    def test_gpt2_transposes_and_interleaves_by_head(self, tmp_path: Path) -> None:
        """3 heads of 2: columns of c_attn are q0 q1 q2 k0 k1 k2 v0 v1 v2, rows of linear_qkv q0 k0 v0 q1 k1 v1 ..."""
        hub = saved(tmp_path, "gpt2", n_embd=6, n_head=3, n_layer=1, n_inner=10)
        there = moved(tmp_path)
        order = [0, 1, 6, 7, 12, 13, 2, 3, 8, 9, 14, 15, 4, 5, 10, 11, 16, 17]
        attention, h = "decoder.layers.0.self_attention", "transformer.h.0"
        assert torch.equal(there[f"{attention}.linear_qkv.weight"][...], hub[f"{h}.attn.c_attn.weight"].T[order])
        assert torch.equal(there[f"{attention}.linear_qkv.bias"][...], hub[f"{h}.attn.c_attn.bias"][order])
        for name, conv in (("linear_fc1", "c_fc"), ("linear_fc2", "c_proj")):
            assert torch.equal(there[f"decoder.layers.0.mlp.{name}.weight"][...], hub[f"{h}.mlp.{conv}.weight"].T)

    def test_gate_rows_come_before_up_rows(self, tmp_path: Path) -> None:
        hub, there = saved(tmp_path, "llama", num_hidden_layers=1), moved(tmp_path)
        halves = [hub[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(there["decoder.layers.0.mlp.linear_fc1.weight"][...], torch.cat(halves))

    def test_mimos_multi_token_prediction_takes_the_embedding_first(self, tmp_path: Path) -> None:
        """MiMo's matrix reads the hidden state first, then the embedding. Megatron's reads the embedding first."""
        hub = saved(tmp_path, "mimo", num_nextn_predict_layers=2, tie_word_embeddings=False)
        there = moved(tmp_path)
        for layer in range(2):
            hidden, embedding = hub[f"model.mtp_layers.{layer}.input_proj.weight"].chunk(2, dim=1)
            found = there[f"mtp.layers.{layer}.eh_proj.weight"][...]
            assert torch.equal(found, torch.cat([embedding, hidden], dim=1))

    def test_gpt_oss_gate_and_up_take_turns_in_the_hub_alone(self, tmp_path: Path) -> None:
        """3 gate and 3 up columns g0 u0 g1 u1 g2 u2 are rows g0 g1 g2 u0 u1 u2. down is transposed, though square."""
        more = {"intermediate_size": 3, "hidden_size": 3, "num_hidden_layers": 1, "num_local_experts": 2}
        hub, there = saved(tmp_path, "gpt_oss", **more), moved(tmp_path)
        experts, order = "model.layers.0.mlp.experts", [0, 2, 4, 1, 3, 5]
        for e in range(2):
            ours = f"decoder.layers.0.mlp.experts.local_experts.{e}"
            assert torch.equal(there[f"{ours}.linear_fc1.weight"][...], hub[f"{experts}.gate_up_proj"][e].T[order])
            assert torch.equal(there[f"{ours}.linear_fc1.bias"][...], hub[f"{experts}.gate_up_proj_bias"][e][order])
            assert torch.equal(there[f"{ours}.linear_fc2.weight"][...], hub[f"{experts}.down_proj"][e].T)
            assert torch.equal(there[f"{ours}.linear_fc2.bias"][...], hub[f"{experts}.down_proj_bias"][e])

    def test_gpt_oss_stacks_are_a_few_copies(self) -> None:
        """Interleaved columns are boxes with a step, not one box per column."""
        there = to_namespace(hub_of(config_of("gpt_oss")), MEGATRON, Layout())
        back = to_namespace(there, HUB)
        assert (
            len(
                list(
                    there.tensors["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", WEIGHT].fragments()
                )
            )
            == 2
        )
        assert len(list(back.tensors["model.layers.0.mlp.experts.gate_up_proj", WEIGHT].fragments())) == 2 * 5

    def test_experts_keep_their_numbers(self, tmp_path: Path) -> None:
        """Every expert matches, and a name without a match is an error (Megatron-LM#5844)."""
        hub, there = saved(tmp_path, "mixtral"), moved(tmp_path)
        for n in range(2):
            for e in range(5):
                ours, theirs = f"decoder.layers.{n}.mlp.experts.local_experts.{e}", f"model.layers.{n}.block_sparse_moe"
                w1, w2, w3 = (hub[f"{theirs}.experts.{e}.w{i}.weight"] for i in (1, 2, 3))
                assert torch.equal(there[f"{ours}.linear_fc1.weight"][...], torch.cat([w1, w3]))
                assert torch.equal(there[f"{ours}.linear_fc2.weight"][...], w2)
        renamed = dict(api.open(tmp_path).tensors)
        name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
        renamed[name.format("stacked"), WEIGHT] = renamed.pop((name.format(3), WEIGHT)).renamed(name.format("stacked"))
        error = refused(LossError, replace(api.open(tmp_path), tensors=renamed))
        assert error.exit_code == 6 and error.fqn == name.format("stacked")

    def test_equal_values_say_nothing(self, tmp_path: Path) -> None:
        """Names alone place tensors, whatever their values (lmms-engine#160)."""
        saved(tmp_path, "qwen3_moe")
        ones = {name: torch.ones_like(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        save_file(ones, tmp_path / "model.safetensors", {"format": "pt"})
        there = moved(tmp_path)
        for (name, _), tensor in there.tensors.items():
            check_source(tensor)
            assert there[name][...].sum() == prod(tensor.shape) - (name in (EMBEDDING, OUTPUT)) * (384 - 259) * 35


class TestPadding:
    @pytest.mark.parametrize("tp, padded", [(1, 384), (2, 512), (3, 384), (8, 1024)])
    def test_rows_are_zero_up_to_what_megatron_pads_to(self, tmp_path: Path, tp: int, padded: int) -> None:
        """The vocabulary doesn't divide among the ranks, so it is padded (Megatron-Bridge#1853)."""
        hub, there = saved(tmp_path, "llama"), moved(tmp_path, tp=tp)
        for ours, theirs in ((EMBEDDING, "model.embed_tokens.weight"), (OUTPUT, "lm_head.weight")):
            found = there[ours][...]
            assert torch.equal(found[:259], hub[theirs]) and not found[259:].any() and len(found) == padded
        assert arguments(there)["padded_vocab_size"] == padded
        assert any("padded" in note for note in there.notes)

    @pytest.mark.parametrize("architecture", ["llama", "qwen2"])
    def test_padding_is_cut_from_both_ends_of_the_model(self, tmp_path: Path, architecture: str) -> None:
        """Megatron's extra rows are cut, whatever they contain (Megatron-Bridge#625)."""
        hub = saved(tmp_path / "hub", architecture)
        there = moved(tmp_path / "hub")
        tensors = {name: there[name][...].clone() for name, _ in there.tensors}
        for name in {EMBEDDING, OUTPUT} & tensors.keys():
            tensors[name][259:] = torch.randn(384 - 259, 35)
        (tmp_path / "trained").mkdir()
        save_file(tensors, tmp_path / "trained/model.safetensors")
        trained = replace(api.open(tmp_path / "trained"), namespace=MEGATRON, config=there.config)
        conversion = api.plan(trained, "hf")
        assert "the vocabulary's padding is left out: 125 of 384 rows (unused)" in conversion.plan.target.notes
        conversion.run(tmp_path / "back")
        back = load_file(tmp_path / "back/model.safetensors")
        assert back.keys() == hub.keys() and all(torch.equal(back[name], hub[name]) for name in hub)

    def test_optimizer_states_are_padded_too(self) -> None:
        hub = hub_of(config_of("llama"))
        states = {
            (fqn, role): tensor._replace(role=role, dtype=FLOAT32)
            for (fqn, _), tensor in hub.tensors.items()
            for role in ("master", "exp_avg")
        }
        groups = (ParamGroup(tuple(fqn for fqn, _ in hub.tensors), {"lr": 0.1}),)
        state = TrainingState(3, groups, {"step": {fqn: 3 for fqn, _ in hub.tensors}})
        there = to_namespace(replace(hub, tensors={**hub.tensors, **states}, state=state), MEGATRON, Layout())
        for role in (WEIGHT, "master", "exp_avg"):
            *_, last = there.tensors[EMBEDDING, role].fragments()
            assert last.extent.path == ZEROS and last.extent.dtype == there.tensors[EMBEDDING, role].dtype
        assert set(there.state.param_groups[0].fqns) == {fqn for fqn, _ in there.tensors}
        assert set(there.state.scalars["step"]) == set(there.state.param_groups[0].fqns)

    def test_param_groups_of_experts_are_those_of_the_others_elsewhere(self) -> None:
        """DeepSpeed expects experts in the same param groups as other parameters."""
        there = to_namespace(hub_of(config_of("qwen3_moe")), MEGATRON, Layout())
        names = [fqn for fqn, _ in there.tensors]
        experts = tuple(name for name in names if ".experts." in name)
        norms = tuple(name for name in names if "norm" in name)
        others = tuple(name for name in names if name not in (*experts, *norms))
        groups = (
            ParamGroup(others, {"wd_mult": 1.0, "is_expert_parallel": False}),
            ParamGroup(norms, {"wd_mult": 0.0, "is_expert_parallel": False}),
            ParamGroup(experts, {"wd_mult": 1.0, "is_expert_parallel": True}),
        )
        back = to_namespace(replace(there, state=replace(there.state, param_groups=groups)), HUB)
        assert [dict(group.options) for group in back.state.param_groups] == [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
        named = [fqn for group in back.state.param_groups for fqn in group.fqns]
        assert sorted(named) == sorted(fqn for fqn, _ in back.tensors)

    def test_resharding_pads_anew(self, tmp_path: Path) -> None:
        """From tp 1 to 4, a vocabulary of 259 takes 512 rows instead of 384. Back at tp 1 it has 384 again."""
        saved(tmp_path, "llama")
        one = moved(tmp_path)
        args = {**arguments(one), "tensor_model_parallel_size": 1}
        one = replace(one, state=TrainingState(args=args))
        four = to_namespace(one, MEGATRON, Layout(tp=4))
        assert torch.equal(four[EMBEDDING][:384], one[EMBEDDING][...]) and not four[EMBEDDING][384:].any()
        assert four.tensors[OUTPUT, WEIGHT].shape[0] == arguments(four)["padded_vocab_size"] == 512
        assert to_namespace(one, MEGATRON, Layout(tp=1)) is one
        assert to_namespace(one, MEGATRON, Layout(pp=2)) is one
        assert api.verify(one, four).equal

    def test_padding_that_is_asked_for(self, tmp_path: Path) -> None:
        """--make-vocab-size-divisible-by applies to Hub models and to runs with another value."""
        saved(tmp_path, "llama")
        one = moved(tmp_path, make_vocab_size_divisible_by=1)
        assert one.tensors[EMBEDDING, WEIGHT].shape[0] == 259
        two = to_namespace(one, MEGATRON, Layout(tp=2, make_vocab_size_divisible_by=64))
        assert torch.equal(two[EMBEDDING][:259], one[EMBEDDING][...]) and not two[EMBEDDING][259:].any()
        args = arguments(two)
        assert (args["make_vocab_size_divisible_by"], args["padded_vocab_size"]) == (64, 384)
        unknown = described({EMBEDDING: (384, 8), "decoder.final_layernorm.weight": (8,)}, None, MEGATRON)
        with pytest.raises(UsageError, match="needs the vocabulary size"):
            to_namespace(unknown, MEGATRON, Layout(make_vocab_size_divisible_by=64))

    def test_rows_that_do_not_divide_and_no_vocabulary(self) -> None:
        shapes = {EMBEDDING: (385, 8), OUTPUT: (385, 8), "decoder.final_layernorm.weight": (8,)}
        unknown = described(shapes, None, MEGATRON)
        with pytest.raises(UsageError, match="do not divide") as caught:
            to_namespace(unknown, MEGATRON, Layout(tp=2))
        assert "--config" in str(caught.value.hint)
        assert to_namespace(unknown, MEGATRON, Layout(tp=5)).tensors[EMBEDDING, WEIGHT].shape == (385, 8)

    def test_fewer_rows_than_tokens(self) -> None:
        config = config_of("llama")
        there = to_namespace(hub_of(config), MEGATRON, Layout())
        assert refused(CorruptError, replace(there, config={**config, "vocab_size": 400}), HUB).fqn == EMBEDDING


class TestRefusals:
    def test_a_tensor_without_a_place(self) -> None:
        for architecture in ARCHITECTURES:
            config = config_of(architecture)
            hub = hub_of(config)
            there = to_namespace(hub, MEGATRON, Layout())
            for side, namespace in ((hub, MEGATRON), (there, HUB)):
                extra = described({"decoder.layers.0.surprise": (2,)}, config).tensors
                error = refused(LossError, replace(side, tensors={**side.tensors, **extra}), namespace)
                assert (error.exit_code, error.fqn) == (6, "decoder.layers.0.surprise")

    def test_a_tensor_that_is_missing(self) -> None:
        hub = hub_of(config_of("qwen2"))
        lost = ("model.layers.1.self_attn.k_proj.bias", WEIGHT)
        error = refused(CorruptError, replace(hub, tensors={k: t for k, t in hub.tensors.items() if k != lost}))
        assert error.fqn == lost[0]

    def test_a_tensor_of_another_shape(self) -> None:
        config = config_of("llama")
        error = refused(CorruptError, replace(hub_of(config), config={**config, "intermediate_size": 54}))
        assert "config" in str(error.hint)

    @pytest.mark.parametrize("config", [None, {}, {"vocab_size": 3}])
    def test_no_config(self, config: dict[str, Any] | None) -> None:
        there = described({EMBEDDING: (4, 2)}, config, MEGATRON)
        for namespace in (HUB, TRANSFORMERS):
            error = refused(NotFoundError, there, namespace)
            assert "--config" in str(error.hint)
        error = refused(NotFoundError, described({"w": (4, 2)}, config, OWN))
        assert "--config" in str(error.hint)

    def test_an_architecture_without_a_table(self) -> None:
        for model_type in ("my_model", "_table", "os.path", "../llama"):
            error = refused(UsageError, described({"w": (2,)}, {"model_type": model_type}))
            assert "llama" in str(error.expected)

    @pytest.mark.parametrize(
        "architecture, more",
        [
            ("gpt_neox", {"attention_bias": False}),
            ("llama", {"hidden_act": "gelu"}),
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
            ("llama", {"rope_scaling": {"type": "longrope"}, "rope_parameters": None}),
            ("gpt2", {"activation_function": "relu"}),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
            ("gpt2", {"scale_attn_weights": False}),
            ("gpt_bigcode", {"scale_attn_weights": False}),
            ("iquestcoder", {"clip_qkv": 8.0}),
            ("iquestcoder", {"use_sliding_window": True}),
            ("ernie4_5", {"use_sliding_window": True}),
            ("bailing_moe", {"use_sliding_window": True}),
            ("gpt_oss", {"swiglu_alpha": 1.5}),
            ("baichuan", {"z_loss_weight": 0}),
            ("baichuan", {"vocab_size": 125696}),
            ("baichuan", {"max_position_embeddings": None}),
            ("chatglm", {"rope_ratio": 50, "_name_or_path": "THUDM/chatglm2-6b-32k"}),
            ("deepseek_v3", {"norm_topk_prob": False}),
            ("deepseek_v3", {"rope_interleave": False}),
            ("deepseek_v3", {"num_experts_per_tok": 3}),
            ("dots1", {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}),
            ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
            ("deepseek_v2", {"rope_parameters": {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.7}}),
            ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 40.0, "attention_factor": 1.2}}),
            ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 40.0, "truncate": False}}),
            ("glm4_moe", {"norm_topk_prob": False}),
            ("ministral", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}),
            ("arcee", {"rope_parameters": {"type": "yarn", "factor": 20.0}}),
            ("phi3", {"rope_scaling": {"type": "longrope"}}),
            ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}),
            ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}),
            ("cwm", {"sliding_window": 8, "layer_types": None}),
            ("gpt_oss", {"sliding_window": 8, "layer_types": None}),
            ("stablelm", {"use_parallel_residual": True}),
            ("starcoder2", {"hidden_act": "silu"}),
            ("megatron-bert", {"hidden_act": "gelu_new"}),
            ("megatron-bert", {"type_vocab_size": 3}),
            ("megatron-bert", {"is_decoder": True}),
            ("megatron-bert", {"tie_word_embeddings": False}),
            ("megatron-bert", {"architectures": ["MegatronBertForMaskedLM"]}),
            ("megatron-bert", {"architectures": ["MegatronBertModel"]}),
        ],
    )
    def test_what_megatron_would_compute_otherwise(self, architecture: str, more: dict[str, Any]) -> None:
        config = config_of(architecture)
        assert refused(LossError, replace(hub_of(config), config={**config, **more})).exit_code == 6

    @pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(TWINS)))
    def test_what_a_config_leaves_out_is_the_default_of_its_class(self, architecture: str) -> None:
        """Drop each config entry, also nested ones. The default applies, the config is refused, or shapes differ."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        whole, silent = config_of(architecture), []
        for part in filter(whole.get, ("text_config", "vision_config")):
            silent += [{**whole, part: without(whole[part], name)} for name in whole[part]]
        for config in [*(without(whole, name) for name in whole), *silent]:
            try:
                found = answer_of(config, architecture)
            except CkptError:
                continue
            try:
                read = AutoConfig.for_model(**{**config, "model_type": architecture}).to_dict()
                expected = answer_of(json.loads(json.dumps(read)), architecture)
            except (CkptError, StrictDataclassError):
                continue  # the class can't build a model from it either
            assert found[1] != expected[1] or found[0] == expected[0]

    def test_exaone_ties_its_embeddings_where_the_config_is_silent(self) -> None:
        """See LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct, configuration_exaone.py."""
        config = {name: value for name, value in config_of("exaone").items() if name != "tie_word_embeddings"}
        found, (top, *_) = answer_of(config, "exaone")
        assert not found["untie_embeddings_and_output_weights"] and "lm_head.weight" not in top

    def test_flint_takes_its_window_from_the_config(self) -> None:
        config = {name: value for name, value in config_of("flint").items() if name != "sliding_window"}
        assert "sliding_window" in str(refused(CorruptError, described({}, config)))

    @pytest.mark.parametrize(("first", "slides"), [(None, None), (1, [0, 1]), (0, None)])
    def test_dots1_slides_from_the_layer_that_the_config_states(
        self, first: int | None, slides: list[int] | None
    ) -> None:
        from transformers import AutoConfig

        stated = {"sliding_window": 8, **({} if first is None else {"max_window_layers": first})}
        config = {name: value for name, value in config_of("dots1").items() if name != "layer_types"} | stated
        table = table_of("dots1")
        found = table.args(table.family.sizes(config))
        assert (found["window_size"], found["window_attn_skip_freq"]) == (None if first is None else (7, 0), slides)
        kinds = AutoConfig.for_model(**config).layer_types
        assert [kind == "sliding_attention" for kind in kinds] == [first == 0, first is not None]

    @pytest.mark.parametrize(
        ("architecture", "stated", "expected"),
        [
            ("phi3", {"rope_theta": 5e5, "partial_rotary_factor": 0.75}, (500000, 0.75)),
            ("glm", {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, (10000, 0.25)),
            ("glm4_moe", {"rope_theta": 1e6, "rope_scaling": None}, (1000000, 0.5)),
            ("stablelm", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e4}, (20000, 0.25)),
            ("gpt_neox", {"rotary_emb_base": 500, "rotary_pct": 0.5}, (500, 0.5)),
            ("llama", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, (1000000, 1.0)),  # the class has no default
        ],
    )
    def test_rotary_positions_are_stated_in_older_configs_as_transformers_reads_them(
        self, architecture: str, stated: dict[str, Any], expected: tuple[int, float]
    ) -> None:
        from transformers import AutoConfig

        config = {name: value for name, value in config_of(architecture).items() if name != "rope_parameters"} | stated
        table = table_of(architecture)
        found = table.args(table.family.sizes(config))
        assert (found["rotary_base"], found["rotary_percent"]) == expected
        read = AutoConfig.for_model(**config).rope_parameters
        assert read["rope_theta"] == expected[0]
        assert architecture == "llama" or read["partial_rotary_factor"] == expected[1]

    @pytest.mark.parametrize(
        ("architecture", "name"),
        [("seed_oss", "residual_dropout"), ("starcoder2", "residual_dropout"), ("phi3", "resid_pdrop")],
    )
    def test_dropout_of_what_is_added_to_the_residual(self, architecture: str, name: str) -> None:
        table = table_of(architecture)
        found = table.args(table.family.sizes(config_of(architecture, **{name: 0.25})))
        assert found["hidden_dropout"] == 0.25

    @pytest.mark.parametrize(
        ("architecture", "more", "name"),
        [
            ("llama", {"attention_bias": True}, "self_attn.o_proj.bias"),
            ("llama", {"mlp_bias": True}, "mlp.gate_proj.bias"),
            ("qwen3", {"attention_bias": True}, "self_attn.o_proj.bias"),
            ("qwen3_moe", {"attention_bias": True}, "self_attn.o_proj.bias"),
            ("gpt_oss", {"attention_bias": False}, "mlp.experts.gate_up_proj_bias"),
            ("deepseek_v3", {"attention_bias": True}, "self_attn.q_a_proj.bias"),
        ],
    )
    def test_biases_that_megatron_has_in_all_layers_or_in_none(
        self, architecture: str, more: dict[str, Any], name: str
    ) -> None:
        """A config may ask for biases only in attention. Megatron has no place for o_proj's bias then."""
        config = config_of(architecture, **more)
        hub = families.saved(config)
        assert hub is not None
        assert refused(LossError, described(hub.required, config)).fqn == f"model.layers.0.{name}"

    @pytest.mark.parametrize(
        "architecture, name",
        [
            ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_blocks"),
            ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight_scale_inv"),
        ],
    )
    def test_quantized_weights(self, architecture: str, name: str) -> None:
        config = config_of(architecture)
        shapes = {**relation_of(config)[0].a_shapes, name: (2, 2)}
        assert "dequantize" in str(refused(LossError, described(shapes, config)).hint)

    @pytest.mark.parametrize("value", [0, -1, "8", 1.5, 1 << 60, True, [2]])
    def test_sizes_that_are_none(self, value: Any) -> None:
        config = config_of("qwen3_moe")
        for name in ("hidden_size", "num_experts", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            with pytest.raises(CkptError):
                to_namespace(replace(hub_of(config), config={**config, name: value}), MEGATRON, Layout())

    def test_parallel_sizes_of_a_format_without_any(self, tmp_path: Path) -> None:
        saved(tmp_path, "llama")
        with pytest.raises(UsageError, match="parallel axes") as caught:
            api.plan(api.open(tmp_path), "hf", Layout(tp=2, decoder_last_pipeline_num_layers=1))
        assert caught.value.found == "--tp --decoder-last-pipeline-num-layers"


class TestWhatFilesReallyHold:
    def test_tensors_that_follow_from_the_config_are_left_out_and_named(self, tmp_path: Path) -> None:
        """GPT-2's own files have a causal mask in every layer, and no prefix."""
        hub = saved(tmp_path, "gpt2")
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in hub.items()}
        tensors |= {f"h.{n}.attn.bias": torch.ones(1, 1, 4, 4) for n in range(2)}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        there = moved(tmp_path)
        assert any("2 tensors implied by the config" in note for note in there.notes)
        back = to_namespace(there, HUB)
        assert {name for name, _ in back.tensors} == set(hub)
        assert all(torch.equal(back[name][...], hub[name]) for name in hub)

    @pytest.mark.parametrize(
        ("architecture", "prefix"), [("qwen3_5_moe", "model.language_model."), ("qwen3_5_moe_text", "model.")]
    )
    def test_experts_that_releases_of_qwen3_5_have_in_stacks(
        self, architecture: str, prefix: str, tmp_path: Path
    ) -> None:
        hub = saved(tmp_path / "apart", architecture)
        shutil.copytree(tmp_path / "apart", tmp_path / "stacked")
        for number in range(3):
            name = f"{prefix}layers.{number}.mlp.experts."
            gates, ups, downs = (
                [hub.pop(f"{name}{expert}.{part}_proj.weight") for expert in range(5)]
                for part in ("gate", "up", "down")
            )
            hub[f"{name}gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
            hub[f"{name}down_proj"] = torch.stack(downs)
        save_file(hub, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
        apart, stacked = (moved(tmp_path / name) for name in ("apart", "stacked"))
        assert apart.tensors.keys() == stacked.tensors.keys()
        assert all(torch.equal(apart[key][...], stacked[key][...]) for key in apart.tensors)

    def test_a_tied_output_layer_that_is_stored_again_is_compared(self, tmp_path: Path) -> None:
        hub = saved(tmp_path, "qwen2")
        head = hub["model.embed_tokens.weight"].clone()
        save_file({**hub, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        tied = moved(tmp_path)
        assert (OUTPUT, WEIGHT) not in tied.tensors and tied.ties == {OUTPUT: EMBEDDING}
        assert len(tied.tensors[EMBEDDING, WEIGHT].replicas) == 1
        head[3, 4] += 1
        save_file({**hub, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        from ckpt.compare.compare import Reader, check_replicas

        with pytest.raises(CorruptError, match="disagree"), Reader() as reader:
            check_replicas(moved(tmp_path).tensors[EMBEDDING, WEIGHT], reader)

    def test_layers_of_multi_token_prediction(self, tmp_path: Path) -> None:
        """The release has layer 61 with copies of embedding and output layer. transformers drops the whole layer."""
        hub = saved(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
        there = moved(tmp_path)
        assert arguments(there)["mtp_num_layers"] == 1
        assert torch.equal(there["mtp.layers.0.eh_proj.weight"][...], hub["model.layers.2.eh_proj.weight"])
        assert len(there.tensors[EMBEDDING, WEIGHT].replicas) == 1
        back = to_namespace(there, HUB)
        assert {name for name, _ in back.tensors} == set(hub)
        without = {name: tensor for name, tensor in hub.items() if not name.startswith("model.layers.2.")}
        save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
        there = moved(tmp_path)
        assert arguments(there)["mtp_num_layers"] is None
        assert any("multi-token prediction" in note for note in there.notes)
        assert {name for name, _ in to_namespace(there, HUB).tensors} == set(without)

    def test_layers_of_multi_token_prediction_that_the_config_does_not_tell_of(self) -> None:
        config = config_of("deepseek_v3", num_nextn_predict_layers=1)
        there = to_namespace(hub_of(config), MEGATRON, Layout())
        error = refused(LossError, replace(there, config={**config, "num_nextn_predict_layers": 0}), HUB)
        assert "num_nextn_predict_layers" in str(error.hint)

    def test_a_run_of_transformers_goes_over_the_hubs_names(self) -> None:
        """In memory, transformers 5 stacks experts."""
        config = config_of("qwen3_moe")
        memory = to_namespace(hub_of(config), TRANSFORMERS)
        assert ("model.layers.1.mlp.experts.gate_up_proj", WEIGHT) in memory.tensors
        there = to_namespace(memory, MEGATRON, Layout())
        assert there.namespace == MEGATRON
        back = to_namespace(there, TRANSFORMERS)
        assert (back.namespace, set(back.tensors)) == (TRANSFORMERS, set(memory.tensors))

    def test_the_routers_bias_is_a_buffer(self) -> None:
        there = to_namespace(hub_of(config_of("deepseek_v3")), MEGATRON, Layout())
        assert [key for key in there.tensors if key[1] == "buffer"] == [
            ("decoder.layers.1.mlp.router.expert_bias", "buffer")
        ]


def test_a_model_of_deepseek_v3s_size_takes_seconds() -> None:
    """Build the relation, its proof and both translations for 46,000 Hub tensors."""
    from transformers import DeepseekV3Config

    config = {**DeepseekV3Config().to_dict(), "num_nextn_predict_layers": 1}
    config = json.loads(json.dumps(config))
    start = time.process_time()
    hub = hub_of(config)
    there = to_namespace(hub, MEGATRON, Layout(tp=8))
    back = to_namespace(there, HUB)
    assert time.process_time() - start < 20
    assert len(hub.tensors) > 46_000 and len(there.tensors) > 31_000
    assert {fqn for fqn, _ in back.tensors} >= {fqn for fqn, _ in hub.tensors}


def test_padding_reads_as_zeros_of_any_dtype() -> None:
    """Padding points to a file of zeros, so every reader of extents can read it."""
    assert np.fromfile(ZEROS, np.uint8, 64).any() == np.False_


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    pytest.importorskip("megatron.core")
    cases = [(name, *case) for name, case in CASES.items()]
    start = (1, "tests.support.megatron_logits", [str(tmp_path_factory.mktemp("logits")), json.dumps(cases)])
    said = fork([start], ["tests.support.megatron_imports"])
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


@pytest.mark.slow
class TestAgainstMegatronCore:
    @pytest.mark.parametrize("case", CASES)
    def test_names_and_shapes_are_the_models_own(self, outcome: dict[str, dict[str, Any]], case: str) -> None:
        assert outcome[case]["different"] == []

    @pytest.mark.parametrize("architecture", TRAINED)
    def test_arguments_are_the_trainers(self, outcome: dict[str, dict[str, Any]], architecture: str) -> None:
        """Differences remain only for arguments that a trainer run fixes or leaves to its options."""
        fixed = {"params_dtype", "bf16", "fp16", "attention_dropout", "hidden_dropout", "mtp_num_layers"}
        padding = {"make_vocab_size_divisible_by", "padded_vocab_size"}
        assert set(outcome[architecture]["arguments"]) <= fixed | padding

    @pytest.mark.parametrize("case", CASES)
    def test_logits_are_the_same_both_ways(self, outcome: dict[str, dict[str, Any]], case: str) -> None:
        bound = TOLERANCE * max(1, outcome[case]["largest"])
        assert outcome[case]["largest"] > 0.5
        assert outcome[case]["to_megatron"] < bound
        assert outcome[case]["to_hub"] < bound

    @pytest.mark.parametrize("case", SEEING)
    def test_megatron_core_loads_what_is_written_into_a_model_with_images(
        self, outcome: dict[str, dict[str, Any]], case: str
    ) -> None:
        assert outcome[case]["unlike"] == []

    @pytest.mark.parametrize("case", SEEING)
    def test_megatrons_optimizer_takes_each_state_for_the_parameter_that_it_is_of(
        self, outcome: dict[str, dict[str, Any]], case: str
    ) -> None:
        """The run comes from transformers. megatron-core numbers parameters in module order."""
        assert outcome[case]["misplaced"] == []

    @pytest.mark.parametrize("case", SEEING)
    def test_an_image_between_tokens_gives_the_same_logits(self, outcome: dict[str, dict[str, Any]], case: str) -> None:
        """The tower comes from transformers, loaded under Megatron-Bridge's tensor names."""
        if CASES[case][0] in TEXT_ALONE:
            assert outcome[case]["seen"] is None
        else:
            assert outcome[case]["seen"] < TOLERANCE


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ep", "2"), ("a model without experts has no expert parallel ranks", "found: ep 2")),
        (("--pp", "3"), ("2 layers can't be split into 3 pipeline stages with 1 chunk",)),
        (
            ("--pp", "2", "--decoder-first-pipeline-num-layers", "7", "--account-for-loss-in-pipeline-split"),
            ("2 layers can't be split into 2", "found: 7 in the first, the loss counted"),
        ),
    ],
)
def test_sizes_that_the_model_has_no_use_for(
    options: tuple[str, ...], said: tuple[str, ...], fixtures: Path, tmp_path: Path
) -> None:
    source = fixtures / "megatron-dist-flattened"
    for way in ("megatron", "megatron-dist"):
        refused = commands.ckpt("convert", "megatron-dist", way, source, "-o", tmp_path / way, *options)
        assert refused.code == 2, refused.err
        assert all(words in refused.err for words in said)
        assert "None" not in refused.err


# -- rank files ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asked", [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "ep": 4, "etp": 1}, {"pp": 2}])
def test_files_of_ranks_are_those_that_each_would_have_for_itself(asked: dict[str, int]) -> None:
    """Files with other tensor boxes but otherwise equal content are laid out once."""
    layout = Layout(**asked)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4}
    hub = hub_of(config_of("qwen3_moe", num_experts=4, num_key_value_heads=2, **sizes))
    model = describe_model(to_namespace(hub, MEGATRON, layout), layout)
    files = ModelFiles(model, None, {})
    for rank in model.grid.ranks():
        chunks, name = model.chunks(rank), f"{folder_name(rank, model.grid)}/model_optim_rng.pt"
        assert files.file(name, chunks, {}) == torch_file(name, files.root(chunks))
    assert len(files.forms) <= model.grid.pp
