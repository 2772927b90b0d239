"""`converters/megatron/dist/nemo.py`, `nemo_1.py`, `format.py`, `read.py`, `checkpoint.py`: checkpoints from NeMo.

NeMo 2 saved one. The other follows NeMo 1's source code. `fixtures/make_nemo.py FOLDER` loads the results in NeMo.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckpt
from ckpt.containers.dcp.metadata import read_metadata
from ckpt.errors import LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import WEIGHT
from converters.names.megatron.model.spelling import split_layer
from tests.formats.megatron.dcp_keys import rename_keys
from tests.support import commands
from tests.support.describing import content
from tests.support.engines import raw
from tests.support.places import FIXTURES

NEMO = FIXTURES / "nemo"
CONTEXT = NEMO / "model" / "context"
#: The fixture's model.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
SOURCE = FIXTURES / "megatron-dist-flattened"
NAME = "model--step=2-last"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "checkpoints" / NAME
    shutil.copytree(SOURCE / "iter_0000002", step / "weights")
    (step / "context" / "nemo_tokenizer").mkdir(parents=True)
    (step / "context" / "model.yaml").write_text("_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\n")
    (step / "context" / "nemo_tokenizer" / "tokenizer.json").write_text("{}")
    (step / "weights" / "common.pt").write_bytes(b"whatever Lightning has put there")
    rename_keys(step / "weights", _nemos)
    return tmp_path / "run"


def _nemos(key: str) -> str:
    if key.startswith("optimizer.state."):
        state, _, rest = key.removeprefix("optimizer.state.").partition(".")
        return f"optimizer.state.{state}.module.{rest}"
    return f"module.{key}" if key.startswith(("embedding.", "decoder.", "output_layer.")) else key


def test_the_model_is_read_wherever_one_points(run: Path) -> None:
    expected = {key: content(one) for key, one in ckpt.open(SOURCE).tensors.items() if key[1] == WEIGHT}
    step = run / "checkpoints" / NAME
    for path in (run, step, step / "weights"):
        checkpoint = ckpt.open(path)
        assert (checkpoint.format, checkpoint.path) == ("megatron-dist", str(step / "weights"))
        assert {key: content(one) for key, one in checkpoint.tensors.items()} == expected
        assert any("NeMo 2 checkpoint: its training state is left out" in note for note in checkpoint.notes)


def test_the_hub_gets_what_megatron_lm_would_have_given(run: Path, tmp_path: Path) -> None:
    known, found = (tmp_path / name for name in ("known", "found"))
    for source, output in ((SOURCE, known), (run, found)):
        done = commands.ckpt("convert", "auto", "hf", source, "-o", output, "--config", SOURCE)
        assert done.code == 0, done.err
    assert commands.ckpt("verify", known, found).code == 0
    assert (found / "tokenizer.json").is_file()


def test_nothing_is_resumed(run: Path) -> None:
    """Megatron-LM needs its arguments to load a run, but NeMo doesn't save them."""
    done = commands.ckpt("resume", run)
    assert done.code == 6 and "no checkpoint here has an optimizer" in done.err, done.err
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def test_several_are_not_guessed_among(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / NAME, run / "checkpoints" / "model--step=1")
    with pytest.raises(NotFoundError, match="several NeMo 2 checkpoints") as caught:
        ckpt.open(run)
    assert NAME in str(caught.value.hint)
    assert ckpt.open(run / "checkpoints" / "model--step=1").format == "megatron-dist"


def test_an_adapter_of_unknown_names_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / NAME / "weights" / "adapter_metadata.json").write_text('{"model_ckpt_path": "base"}')
    for command in (("convert", "auto", "peft"), ("merge-lora",)):
        done = commands.ckpt(*command, run, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (NotFoundError.exit_code, False)
        assert "NeMo 2 adapters" in done.err and "target='hf-peft'" in done.err


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return the fixture's model in Hub format."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = commands.ckpt("convert", "auto", "hf", NEMO / "model", "-o", tmp_path / "hub", "--config", tmp_path)
    assert done.code == 0, done.err
    return tmp_path / "hub"


def test_the_model_is_the_one_that_nemo_held() -> None:
    known = {name: raw(tensor) for name, tensor in load_file(NEMO / "truth" / "truth.safetensors").items()}
    found = {_fused(fqn): content(tensor) for (fqn, _), tensor in ckpt.open(NEMO / "model").tensors.items()}
    assert found == known and len(known) == 15


def _fused(fqn: str) -> str:
    """Return the name in memory with megatron-core's own layers. Files have Transformer Engine's names."""
    own = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    prefix, rest = split_layer(fqn)
    return prefix + own.get(rest, rest)


def test_a_model_of_the_hub_becomes_the_folder_that_nemo_wrote(hub: Path, tmp_path: Path) -> None:
    done = commands.ckpt(
        "convert", "hf", "megatron-dist", hub, "-o", tmp_path / "out", "--ckpt-format", "nemo", "--config", CONTEXT
    )
    assert done.code == 0, done.err
    theirs, ours = (set(read_metadata(folder / "weights").keys) for folder in (NEMO / "model", tmp_path / "out"))
    assert theirs <= ours and all("._extra_state/" in key for key in ours - theirs)
    known, found = ckpt.open(NEMO / "model"), ckpt.open(tmp_path / "out")
    assert {k: content(one) for k, one in found.tensors.items()} == {
        k: content(one) for k, one in known.tensors.items()
    }
    for path in CONTEXT.rglob("*.*"):
        assert (tmp_path / "out" / "context" / path.relative_to(CONTEXT)).read_bytes() == path.read_bytes()


def test_a_run_of_megatron_lm_is_written_for_nemo_without_its_optimizer(tmp_path: Path) -> None:
    context = tmp_path / "context"
    shutil.copytree(CONTEXT, context)
    config = context / "model.yaml"
    sizes = {"hidden_size: 16": "hidden_size: 6", "ffn_hidden_size: 24": "ffn_hidden_size: 7", "1.0e-05": "1.0e-06"}
    sizes |= {"num_attention_heads: 4": "num_attention_heads: 3", "num_query_groups: 2": "num_query_groups: 1"}
    sizes |= {"500000.0": "10000"}
    words = ("convert", "auto", "megatron-dist", SOURCE, "-o", tmp_path / "out", "--ckpt-format", "nemo")
    for stated, known in sizes.items():
        done = commands.ckpt(*words, "--config", context)
        assert done.code == LossError.exit_code and "the NeMo context belongs to another model" in done.err
        config.write_text(config.read_text().replace(stated, known))
    done = commands.ckpt(*words, "--config", context, "-v")
    assert done.code == 0 and "optimizer states exp_avg, exp_avg_sq" in done.err, done.err
    expected = {key: content(one) for key, one in ckpt.open(SOURCE).tensors.items() if key[1] == WEIGHT}
    assert {key: content(one) for key, one in ckpt.open(tmp_path / "out").tensors.items()} == expected


#: Changes to the context's settings, and the refusal.
CONTEXTS = [
    ("rotary_percent: 1.0", "rotary_percent: 0.5", "expected: rotary_percent 1.0\n  found: rotary_percent 0.5"),
    ("rotary_interleaved: false", "rotary_interleaved: true", "found: rotary_interleaved True"),
    ("seq_len_interpolation_factor: null", "seq_len_interpolation_factor: 2.0", "interpolation_factor 2.0"),
    ("layernorm_zero_centered_gamma: false", "layernorm_zero_centered_gamma: true", "apply_layernorm_1p True"),
    ("torch.nn.functional.silu", "torch.nn.functional.relu", "activation_func torch.nn.functional.relu"),
    ("window_size: null", "window_size: [7, 0]", "found: window_size 7"),
    ("share_embeddings_and_output_weights: false", "share_embeddings_and_output_weights: true", "weights True"),
    ("add_qkv_bias: false", "add_qkv_bias: true", "found: decoder.layers.0.self_attention.linear_qkv.bias [32]"),
    ("add_bias_linear: false", "add_bias_linear: true", ".bias [32]"),
    ("qk_layernorm: false", "qk_layernorm: true", "found: decoder.layers.0.self_attention.q_layernorm.weight [4]"),
    ("softmax_scale: null", "softmax_scale: 0.3", "found: softmax_scale 0.3"),
    ("rotary_percent: 1.0", "rotary_percent: 1.0\n  scale_factor: 8.0", "found: use_rope_scaling True"),
    ("rotary_percent: 1.0", "rotary_percent: 1.0\n  nobody_has_heard_of_it: 3", "it 3 (unknown to ckpt)"),
]


@pytest.mark.parametrize(("stated", "changed", "said"), CONTEXTS, ids=[changed for _, changed, _ in CONTEXTS])
def test_a_context_of_another_model_is_refused(stated: str, changed: str, said: str, hub: Path, tmp_path: Path) -> None:
    context = Path(shutil.copytree(CONTEXT, tmp_path / "context"))
    text = (context / "model.yaml").read_text()
    assert text.count(stated) == 1
    (context / "model.yaml").write_text(text.replace(stated, changed))
    words = ("convert", "hf", "megatron-dist", hub, "-o", tmp_path / "out", "--ckpt-format", "nemo")
    done = commands.ckpt(*words, "--config", context)
    assert (done.code, (tmp_path / "out").exists()) == (LossError.exit_code, False), done.err
    assert said in done.err, done.err


def test_a_model_without_a_tensor_of_its_context_is_incomplete(tmp_path: Path) -> None:
    model = Path(shutil.copytree(NEMO / "model", tmp_path / "model"))
    config = model / "context" / "model.yaml"
    config.write_text(config.read_text().replace("add_qkv_bias: false", "add_qkv_bias: true"))
    done = commands.ckpt("check", model)
    assert done.code == 4 and "linear_qkv.bias" in done.out + done.err, done.err


def test_a_setting_of_the_run_that_the_context_lacks_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(CONFIG))
    assert commands.ckpt("convert", "auto", "hf", NEMO / "model", "-o", scaled, "--config", plain).code == 0
    (scaled / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}))
    done = commands.ckpt(
        "convert", "hf", "megatron-dist", scaled, "-o", tmp_path / "out", "--ckpt-format", "nemo", "--config", CONTEXT
    )
    assert done.code == LossError.exit_code and "expected: use_rope_scaling True" in done.err, done.err


def test_without_a_context_nothing_is_written_for_nemo(hub: Path, tmp_path: Path) -> None:
    done = commands.ckpt("convert", "hf", "megatron-dist", hub, "-o", tmp_path / "out", "--ckpt-format", "nemo")
    assert (done.code, (tmp_path / "out").exists()) == (UsageError.exit_code, False)
    assert "llm.import_ckpt" in done.err


#: Config from NeMo 1's examples/nlp/language_modeling/conf/megatron_llama_config.yaml, for this model.
CONFIG_1 = Path(__file__).with_name("nemo_1.yaml").read_text()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """Unpack a NeMo 1 archive (nlp/parts/nlp_overrides.py). Its weights have `model.` before Megatron's keys."""
    shutil.copytree(NEMO / "model" / "weights", tmp_path / "first" / "model_weights")
    rename_keys(tmp_path / "first" / "model_weights", lambda key: key.replace("module.", "model.", 1))
    (tmp_path / "first" / "model_config.yaml").write_text(CONFIG_1)
    return tmp_path / "first"


@pytest.mark.parametrize("place", ["", "model_weights"])
def test_an_unpacked_archive_of_nemo_1_is_read(place: str, first: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = commands.ckpt("convert", first / place, "hf", "-o", tmp_path / "hub", "--config", tmp_path / "config.json")
    assert done.code == 0 and "NeMo 1 checkpoint" in done.err, done.err
    known = {key: content(one) for key, one in ckpt.open(NEMO / "model").tensors.items()}
    assert {key: content(one) for key, one in ckpt.open(first / place).tensors.items()} == known
    assert commands.ckpt("check", first / place).code == 0


@pytest.mark.parametrize("given", ["model.nemo", ""])
def test_an_archive_of_nemo_1_is_unpacked_as_the_hint_says(given: str, first: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    subprocess.run(["tar", "-cf", tmp_path / "run" / "model.nemo", "-C", first, "."], check=True)
    refused = commands.ckpt("inspect", tmp_path / "run" / given)
    assert refused.code == NotFoundError.exit_code
    _, hint = refused.err.split("hint: a .nemo file is a tar archive: `")
    command, _, rest = hint.partition("`, then give ")
    subprocess.run(command, shell=True, check=True)
    assert commands.ckpt("inspect", rest.strip()).code == 0


@pytest.mark.parametrize(
    ("stated", "changed", "code", "said"),
    [
        ("rotary_base: 500000.0", "rotary_base: 10000", 4, "rotary_base 10000"),
        ("rotary_base: 500000.0", "", 4, "rotary_base 10000"),  # NeMo 1's default
        ("activation: fast-swiglu", "activation: reglu", 6, "activation_func relu"),
        ("activation: fast-swiglu", "", 4, "swiglu False"),
        ("normalization: rmsnorm", "normalization: layernorm1p", 4, "normalization LayerNorm"),
        ("layernorm_epsilon: 1.0e-05", "layernorm_epsilon: 1.0e-03", 4, "norm_epsilon 0.001"),
        ("rotary_percentage: 1.0", "rotary_percentage: 0.5", 4, "rotary_percent 0.5"),
        ("num_query_groups: 2", "num_query_groups: 1", 4, "num_query_groups 1"),
        ("headscale: false", "headscale: true", 6, "headscale True"),
        ("headscale: false", "scale_positional_embedding: true", 4, "use_rope_scaling True"),
        ("headscale: false", "apply_embedding_scaling: true", 6, "apply_embedding_scaling True"),
        ("headscale: false", "name: megatron_falcon_gpt", 6, "spec megatron_falcon_gpt"),
        ("headscale: false", "mcore_customization_config: {attn_logit_softcapping: 50.0}", 6, "attn_logit_softcapping"),
        ("headscale: false", "seq_len_interpolation_factor: 2.0", 4, "rotary_seq_len_interpolation_factor 2.0"),
        ("headscale: false", "new_thing: 3", 6, "new_thing 3 (unknown to ckpt)"),
        ("headscale: false", "new_thing: false", 0, "1 recorded setting unknown to ckpt"),
        ("seed: 1234", "seed: 7", 0, "can load this folder"),
    ],
)
def test_the_config_of_nemo_1_is_held_against_the_hubs(
    stated: str, changed: str, code: int, said: str, first: Path, tmp_path: Path
) -> None:
    assert stated in CONFIG_1
    (first / "model_config.yaml").write_text(CONFIG_1.replace(stated, changed))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = commands.ckpt("convert", first, "hf", "-o", tmp_path / "hub", "--config", tmp_path / "config.json", "-v")
    assert done.code == code and said in done.err, done.err
    if code == 6:
        name = said.split()[0]
        accepted = commands.ckpt(
            *("convert", first, "hf", "-o", tmp_path / "hub", "--config", tmp_path / "config.json"),
            *("--accept-setting", name),
        )
        assert accepted.code == 0, accepted.err
