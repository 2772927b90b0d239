"""`converters/megatron/dist/bridge.py`, `checkpoint.py`, `write.py`, and more.

Also `converters/names/megatron/config_against_args.py`: runs saved by Megatron-Bridge
(fixtures/make_megatron_bridge_run.py), and a config compared with a run's recorded settings.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpt
from ckpt import api
from ckpt.containers.torchfile.read import read as read_torch
from ckpt.errors import CorruptError, LossError
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, Layout
from converters.megatron.dist.bridge import args_of
from converters.names.megatron.config_against_args import compared, differences, refuse_another_models
from converters.names.megatron.facts import BridgeRun
from converters.names.megatron.relation import table_of_checkpoint
from converters.names.megatron.settings import check_aliases
from tests.support import commands
from tests.support.describing import content
from tests.support.megatron_runs import check_read, truth
from tests.support.places import FIXTURES

FIXTURE = FIXTURES / "megatron-bridge-run"
RUN, STEP = FIXTURE / "run", "iter_0000002"
#: Experts with a sigmoid router.
SIGMOID = {"num_experts": 4, "moe_router_score_function": "sigmoid"}
#: The fixture's model on the Hub.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(RUN, tmp_path / "run")


def _bits(checkpoint: Checkpoint) -> dict[Any, Any]:
    return {key: content(one) for key, one in checkpoint.tensors.items()}


def _weights(run: Path) -> dict[Any, Any]:
    return {key: value for key, value in _bits(ckpt.open(run)).items() if key[1] == WEIGHT}


def _change(run: Path, section: str, **fields: Any) -> None:
    path = run / STEP / "run_config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section] |= fields
    path.write_text(yaml.safe_dump(config, default_flow_style=False))


def test_every_bit_is_what_the_ranks_held() -> None:
    """The optimizer's buffers are `dp_reshardable`, the default. run_config.yaml has the mesh sizes."""
    checkpoint = ckpt.open(RUN)
    check_read(checkpoint, truth(FIXTURE))
    assert (checkpoint.framework, checkpoint.world_size, checkpoint.bound_to_ranks) == ("Megatron-Bridge", 4, True)
    args = checkpoint.state.args
    assert args is not None
    assert (args["tensor_model_parallel_size"], args["data_parallel_size"], args["consumed_train_samples"]) == (
        2,
        2,
        16,
    )


@pytest.mark.parametrize(
    ("layout", "random", "sizes"),
    [({"world_size": 2}, True, (2, 1)), ({"world_size": 3, "tp": 1}, False, (1, 1)), ({"tp": 4}, False, (4, 1))],
)
def test_what_is_written_is_a_run_of_megatron_bridge(
    layout: dict[str, int], random: bool, sizes: tuple[int, int], tmp_path: Path
) -> None:
    source, out = ckpt.open(RUN), tmp_path / "out"
    ckpt.plan(source, "megatron-dist", Layout(**layout)).run(out)
    written = ckpt.open(out)
    assert (written.framework, written.bound_to_ranks) == ("Megatron-Bridge", False)
    assert written.state.scalars == source.state.scalars and written.state.step == 2
    if sizes[0] != 4:  # TP 4 pads the vocabulary differently
        assert _bits(written) == _bits(source)
    assert "args" not in read_torch(out / STEP / "common.pt").root
    before, after = (yaml.safe_load((folder / STEP / "run_config.yaml").read_text()) for folder in (RUN, out))
    model = after["model"]
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == sizes
    assert after["checkpoint"]["save_rng"] is random is ("rng_state" in written.state.per_rank)
    named = {"tensor_model_parallel_size", "expert_tensor_parallel_size"}
    for config in (before, after):
        config["checkpoint"].pop("save_rng")
        config["model"] = {name: value for name, value in config["model"].items() if name not in named}
    assert before == after
    for name in (f"{STEP}/train_state.pt", "latest_train_state.pt", "latest_checkpointed_iteration.txt"):
        assert (out / name).read_bytes() == (RUN / name).read_bytes()
    own = sorted(path.name for path in (RUN / STEP / "tokenizer").iterdir())
    assert own == sorted(path.name for path in (out / STEP / "tokenizer").iterdir())
    assert not any((out / name).exists() for name in own)


def test_resume_converts_for_other_ranks_alone(run: Path) -> None:
    same = commands.ckpt("resume", run, "--world-size", "4")
    assert (same.code, same.out.strip()) == (0, str(run)), same.err
    moved = commands.ckpt("resume", run, "--world-size", "2")
    assert moved.code == 0 and moved.out.strip() != str(run), moved.err
    written = ckpt.open(moved.out.strip())
    assert _bits(written) == _bits(ckpt.open(run)) and written.framework == "Megatron-Bridge"
    assert commands.ckpt("verify", run, moved.out.strip()).code == 0


def test_the_arguments_of_megatron_lm_stand_for_the_settings_elsewhere(tmp_path: Path) -> None:
    done = commands.ckpt("convert", "auto", "megatron", RUN, "-o", tmp_path / "out", "--tp", "1")
    assert done.code == 0 and "; run_config.yaml and train_state.pt" in done.err, done.err
    written = ckpt.open(tmp_path / "out")
    assert _bits(written) == _bits(ckpt.open(RUN)) and written.framework == "Megatron-LM"


def test_settings_that_do_not_go_with_other_sizes_are_named(run: Path, tmp_path: Path) -> None:
    _change(run, "model", sequence_parallel=True, pipeline_dtype=None, num_layers=1)
    done = commands.ckpt("convert", "auto", "megatron-dist", run, "-o", tmp_path / "out", "--tp", "1")
    assert done.code == 0 and "model.sequence_parallel=False" in done.err
    written = yaml.safe_load((tmp_path / "out" / STEP / "run_config.yaml").read_text())["model"]
    assert written["sequence_parallel"] is False


def _hub(tmp_path: Path, **changed: Any) -> commands.Result:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changed))
    return commands.ckpt("convert", "auto", "hf", RUN, "-o", tmp_path / "hub", "--config", tmp_path, "-v")


def test_the_hub_gets_the_weights_and_the_tokenizer(tmp_path: Path) -> None:
    done = _hub(tmp_path)
    assert done.code == 0 and "opt_param_scheduler" in done.err, done.err
    again = commands.ckpt(
        "convert", "hf", "megatron-dist", tmp_path / "hub", "-o", tmp_path / "back", "--make-vocab-size-divisible-by",
        "8", "--tp", "2",
    )  # fmt: skip
    assert again.code == 0, again.err
    known = _weights(RUN)
    found = _bits(ckpt.open(tmp_path / "back"))
    padded = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert known.keys() == found.keys()
    for (fqn, role), (dtype, shape, data) in known.items():
        used = len(data) // shape[0] * 61 if fqn in padded else len(data)
        assert found[fqn, role][0] == dtype and found[fqn, role][2][:used] == data[:used]
    for path in (RUN / STEP / "tokenizer").iterdir():
        assert (tmp_path / "hub" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("recorded", "config"),
    [
        ({"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True}, {}),
        ({"position_embedding_type": "none", "multi_latent_attention": True}, {"multi_latent_attention": True}),
        ({"moe_router_pre_softmax": True, **SIGMOID}, {"moe_router_pre_softmax": False, **SIGMOID}),
    ],
)
def test_arguments_that_mean_the_same_are_not_compared(recorded: dict[str, Any], config: dict[str, Any]) -> None:
    """The last case is DeepSeek's setup: its router uses no softmax."""
    both = [{"position_embedding_type": "rope", **one} for one in (recorded, config)]
    assert not {"position_embedding_type", "moe_router_pre_softmax"} & set(compared(*both))
    told = [{"num_experts": 4, "position_embedding_type": kind} for kind in ("rope", "learned_absolute")]
    assert {"position_embedding_type", "moe_router_pre_softmax"} < set(compared(*told))


def test_a_window_that_is_wider_by_the_token_itself_is_said(fixtures: Path, tmp_path: Path) -> None:
    """ms-swift passes the config's number to Megatron, but transformers includes the token itself."""
    checkpoint = api.open(fixtures / "megatron-llm-jp" / "run")
    seen = {**(checkpoint.state.args or {}), "window_size": (5, 0)}
    config = json.loads((fixtures / "megatron-llm-jp" / "llm-jp" / "llm-jp-4-moe" / "config.json").read_text())
    table, sizes = table_of_checkpoint(
        replace(checkpoint, config=config | {"use_sliding_window": True, "sliding_window": 5})
    )
    run = replace(checkpoint, state=replace(checkpoint.state, args=seen))
    assert refuse_another_models(run, table, sizes) == [
        "the run's window (5) excludes the token itself, and transformers includes it: with transformers tokens see "
        "one token less than in the run"
    ]
    with pytest.raises(CorruptError, match="another model"):
        refuse_another_models(replace(run, state=replace(run.state, args=seen | {"window_size": (6, 0)})), table, sizes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"yarn_rotary_scaling_factor": 4.0, "position_embedding_type": "yarn"}, {"rotary_scaling_factor": 8.0}),
        ({"layernorm_epsilon": 1e-5}, {"norm_epsilon": 0.5}),
        ({"rope_scaling": False}, {"use_rope_scaling": True}),
        ({"num_moe_experts": 4}, {"num_experts": 8}),
        ({"seq_len_interpolation_factor": 2}, {"rotary_seq_len_interpolation_factor": 4}),
        ({"scale_factor": 8}, {"rope_scaling_factor": 4}),
    ],
    ids=str,
)
def test_two_values_of_a_field_are_refused_by_name(first: dict[str, Any], second: dict[str, Any]) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    args = args_of(BridgeRun("run", {"model": {**sizes, **first, **second}}, {"step": 1}), 1, by_stages=False)
    with pytest.raises(LossError, match="two different values for one setting") as refused:
        check_aliases(args, "run")
    assert all(f"{name} {value}" in str(refused.value) for name, value in (*second.items(), *list(first.items())[:1]))


_LATENT, _SPARSE = {"multi_latent_attention": True}, {"num_experts": 4}
_YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 32.0}
_SLIDING = {"window_size": (4, 0), "num_layers": 4}


@pytest.mark.parametrize(
    ("recorded", "told", "differs"),
    [
        ({"layernorm_zero_centered_gamma": True}, {"apply_layernorm_1p": False}, "apply_layernorm_1p"),
        ({"layernorm_zero_centered_gamma": False}, {"apply_layernorm_1p": False}, None),
        ({"squared_relu": False, "swiglu": False}, {"squared_relu": True, "swiglu": False}, "squared_relu"),
        ({"rotary_interleaved": True}, {"rotary_interleaved": False}, "rotary_interleaved"),
        ({"rotary_interleaved": True, **_LATENT}, {"rotary_interleaved": False, **_LATENT}, None),
        ({"window_size": [4, 0]}, {"window_size": (4, 0)}, None),
        ({"window_size": (-1, 0)}, {}, None),
        ({"window_size": (5, 0)}, {"window_size": (4, 0)}, None),  # config.json's own number, as in ms-swift
        ({"window_size": (6, 0)}, {"window_size": (4, 0)}, "window_size"),
        ({}, {"window_size": (4, 0)}, None),  # a version without windows
        (_SLIDING | {"window_attn_skip_freq": 2}, _SLIDING | {"window_attn_skip_freq": [1, 0, 1, 0]}, None),
        (_SLIDING | {"window_attn_skip_freq": None}, _SLIDING | {"window_attn_skip_freq": 2}, "window_attn_skip_freq"),
        ({"no_rope_freq": 2, "num_layers": 4}, {"no_rope_freq": [0, 1, 0, 1], "num_layers": 4}, None),
        ({"no_rope_freq": None, "num_layers": 4}, {"no_rope_freq": [0, 1, 0, 1], "num_layers": 4}, "no_rope_freq"),
        (
            {"moe_router_num_groups": None, **_SPARSE},
            {"moe_router_num_groups": 8, "moe_router_group_topk": 4, **_SPARSE},
            "moe_router_num_groups",
        ),
        (
            {"moe_router_num_groups": None, **_SPARSE},
            {"moe_router_num_groups": 1, "moe_router_group_topk": 1, **_SPARSE},
            None,
        ),
        ({"rotary_scaling_factor": 1.0, "rope_type": None, **_LATENT}, {"rope_type": "rope", **_LATENT}, None),
        (
            {"rotary_scaling_factor": 1.0, "rope_type": None, **_LATENT},
            {"rotary_scaling_factor": 40, "rope_type": "yarn", **_LATENT},
            "rotary_scaling_factor",
        ),
        (
            {"rotary_scaling_factor": 40.0, "rope_type": "yarn", "mscale_all_dim": 1.0, **_LATENT},
            {"rotary_scaling_factor": 40, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **_LATENT},
            None,
        ),
        (_YARN | dict.fromkeys(("mscale", "yarn_beta_fast"), 1.0), _YARN | {"yarn_beta_fast": 32.0}, "yarn_beta_fast"),
        (
            _YARN | {"yarn_correction_range_round_to_int": None},
            _YARN | {"yarn_correction_range_round_to_int": False},
            "yarn_correction_range_round_to_int",
        ),
        (
            {**_YARN, "yarn_beta_slow": None, "mscale": 1.0, "mscale_all_dim": 0.0},
            {**_YARN, "yarn_beta_slow": 1.0},
            None,
        ),
        ({"activation_func_clamp_value": None}, {"activation_func_clamp_value": 7.0}, "activation_func_clamp_value"),
    ],
)
def test_what_changes_no_shape_is_compared_by_what_it_means(
    recorded: dict[str, Any], told: dict[str, Any], differs: str | None
) -> None:
    rotating = {"position_embedding_type": "rope"}
    found = [name for name, *_ in differences(rotating | recorded, rotating | told)]
    assert found == ([differs] if differs else [])


def test_scaled_positions_that_ms_swift_takes_from_transformers_are_those_of_its_own_argument() -> None:
    """Megatron's own arguments keep their defaults there, whatever the run computed."""
    defaults = {"position_embedding_type": "rope", "use_rope_scaling": False, "rotary_scaling_factor": 1.0}
    defaults |= {"rotary_seq_len_interpolation_factor": None, "mscale": 1.0, "mscale_all_dim": 0.0, "rope_type": None}
    rotating = {"position_embedding_type": "rope"}
    for scaling, more, told in (
        (
            {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            _LATENT,
            rotating | {"rotary_scaling_factor": 40, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        (
            {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "truncate": False},
            {},
            _YARN | {"yarn_correction_range_round_to_int": False, "mscale": None},
        ),
        ({"rope_type": "llama3", "factor": 8.0}, {}, rotating | {"use_rope_scaling": True, "rope_scaling_factor": 8.0}),
        ({"rope_type": "linear", "factor": 2.0}, {}, rotating | {"rotary_seq_len_interpolation_factor": 2}),
        ({"rope_type": "default"}, {}, rotating | {"use_rope_scaling": False}),
    ):
        assert not list(differences(defaults | {"rope_scaling": scaling} | more, told | more)), scaling
        other = defaults | {"rope_scaling": scaling | {"factor": 3.0}} | more
        assert bool(list(differences(other, told | more))) == ("factor" in scaling)


def test_the_config_that_the_run_carries_is_used(run: Path, tmp_path: Path) -> None:
    """Since 0.6, Megatron-Bridge can also save the model for the Hub, in `hf/`."""
    (run / STEP / "hf").mkdir()
    (run / STEP / "hf" / "config.json").write_text(json.dumps(CONFIG))
    done = commands.ckpt("convert", "auto", "hf", run, "-o", tmp_path / "hub")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "hub" / "config.json").read_text()) == CONFIG


def test_the_state_of_another_step_is_refused(run: Path) -> None:
    path = run / STEP / "train_state.pt"
    import torch

    torch.save(torch.load(path) | {"step": torch.tensor(4, dtype=torch.int32)}, path)
    with pytest.raises(CorruptError, match="from a different step than the checkpoint"):
        ckpt.open(run)


@pytest.mark.parametrize(
    "changed",
    [
        {"heterogeneous_layers_config_encoded_json": "{}", "num_layers": 2, "ffn_hidden_size": 24},
        {"qk_layernorm": True, "qk_l2_norm": True},
        {"activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}},
    ],
)
def test_models_with_other_layers_are_read(changed: dict[str, Any], run: Path) -> None:
    """A gate may differ from SwiGLU, and layers may have tensors that no setting mentions."""
    before = _weights(run)
    _change(run, "model", **changed)
    assert _weights(run) == before


def test_somebodys_own_model_class_is_named(run: Path, fixtures: Path, tmp_path: Path) -> None:
    assert not any("class" in note for note in ckpt.open(run).notes)
    _change(run, "model", _target_="lab.models.OwnProvider")
    assert any("the model's class is lab.models.OwnProvider" in note for note in ckpt.open(run).notes)
    model = Path(shutil.copytree(fixtures / "nemo" / "model", tmp_path / "model"))
    assert not any("class" in note for note in ckpt.open(model).notes)
    context = model / "context" / "model.yaml"
    context.write_text(
        context.read_text().replace("_target_: nemo.collections.llm.gpt.model.llama.LlamaModel", "_target_: lab.Own")
    )
    assert any("the model's class is lab.Own" in note for note in ckpt.open(model).notes)


def test_learned_positions_are_as_many_as_a_sequence_has() -> None:
    """Megatron-Bridge sizes them by the sequence length. `max_position_embeddings` has another use there."""
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    model = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 4096, "seq_length": 32} | sizes
    counters = dict.fromkeys(("step", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"), 0)
    assert args_of(BridgeRun("run", {"model": model}, counters), 1, by_stages=False)["max_position_embeddings"] == 32


def test_settings_have_the_names_of_megatron_lms_arguments() -> None:
    model = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "num_moe_experts": 8,
        "layernorm_epsilon": 1e-5,
        "num_layers_in_first_pipeline_stage": 3,
        "gated_linear_unit": True,
        "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
        "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
        "should_pad_vocab": False,
        "make_vocab_size_divisible_by": 128,
        "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder", "loss"]],
    }
    counters = {"step": 1, "consumed_train_samples": 8, "consumed_valid_samples": 0, "skipped_train_samples": 0}
    args = args_of(BridgeRun("run", {"model": model, "ddp": {"bucket_size": 7}}, counters), 8, by_stages=True)
    assert (
        args.items()
        >= {
            "num_experts": 8,
            "norm_epsilon": 1e-5,
            "decoder_first_pipeline_num_layers": 3,
            "swiglu": True,
            "params_dtype": "torch.bfloat16",
            "make_vocab_size_divisible_by": 1,
            "pipeline_model_parallel_layout": "Et|ttL",
            "ddp_bucket_size": 7,
            "transformer_impl": "transformer_engine",
            "untie_embeddings_and_output_weights": False,
            "world_size": 8,
            "data_parallel_size": 4,
        }.items()
    )
