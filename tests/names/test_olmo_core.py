"""`converters/names/olmo_core.py`, `olmo_core_run.py`: OLMo-core's names and settings match its own converter's.

`truth/hf` is by its `save_hf_model`, `truth/configs.json` by its `get_hf_config`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CkptError, CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import HUB, Checkpoint, Layout
from ckpt.plan.namespace import OLMO_CORE
from converters.names import olmo_core
from converters.names.olmo_core_run import check_run
from tests.support.commands import ckpt as process
from tests.support.places import FIXTURES

RUN, TRUTH = FIXTURES / "olmo-core", FIXTURES / "olmo-core" / "truth"
PAIRS = json.loads((TRUTH / "configs.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))


def with_config(run: Path, **entries: Any) -> Checkpoint:
    config = run / "given" / "config.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps({**json.loads((TRUTH / "hf" / "config.json").read_text()), **entries}))
    return ckpt.open(run, config=config.parent)


def test_the_file_is_that_of_its_own_converter(run: Path, tmp_path: Path) -> None:
    done = process("convert", "auto", "hf", run, "--config", TRUTH / "hf", "-o", tmp_path / "hf")
    assert done.code == 0 and "Olmo2ForCausalLM.from_pretrained(" in done.out + done.err, done
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (TRUTH / "hf/model.safetensors").read_bytes()
    assert ckpt.verify(ckpt.open(run, config=TRUTH / "hf"), tmp_path / "hf", only="weights").equal


def test_its_runs_go_on_under_its_names(run: Path, tmp_path: Path) -> None:
    source = with_config(run)
    assert source.namespace == OLMO_CORE
    ckpt.convert(source, "dcp", tmp_path / "dcp", world_size=3)
    assert ckpt.open(tmp_path / "dcp").tensors.keys() == source.tensors.keys()
    named = olmo_core.to_hub(source)
    back = olmo_core.from_hub(named, Layout())
    assert named.namespace == HUB and back.shapes == source.shapes
    assert {role for fqn, role in named.tensors if fqn == "lm_head.weight"} == {"weight", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("theirs", "ours"), [*product(range(len(PAIRS)), repeat=2)])
def test_settings_agree_only_with_their_own_config(run: Path, theirs: int, ours: int) -> None:
    """Cases 1 and 2 differ in a layer that has full attention anyway."""
    (run / "step2" / "config.json").write_text(json.dumps({"model": PAIRS[theirs][0]}))
    checkpoint = replace(with_config(run), config=PAIRS[ours][1])
    if PAIRS[theirs][1] == PAIRS[ours][1]:
        check_run(checkpoint)
        return
    with pytest.raises(CorruptError, match=r"rms_norm_eps|attention windows"):
        check_run(checkpoint)


@pytest.mark.parametrize(
    ("entries", "error", "said"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, CorruptError, "num_attention_heads 2"),
        ({"rms_norm_eps": 1e-5}, CorruptError, "rms_norm_eps 1e-06"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, CorruptError, "rope_theta 500000"),
        ({"rope_parameters": {"rope_theta": 500000, "rope_type": "yarn", "factor": 2.0}}, CorruptError, "rope_type"),
        ({"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}, CorruptError, "attention windows"),
        ({"hidden_act": "gelu"}, CorruptError, "hidden_act silu"),
        ({"tie_word_embeddings": True}, CorruptError, "tie_word_embeddings False"),
        ({"vocab_size": 33}, CorruptError, "vocab_size 32"),
        ({"attention_bias": True}, CkptError, "w_q.bias"),
    ],
)
def test_a_config_of_another_model_is_refused(run: Path, entries: Any, error: type[CkptError], said: str) -> None:
    with pytest.raises(error, match=said):
        ckpt.plan(with_config(run, **entries), "hf")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.update(block_overrides={"0": model["block"]}),
        lambda model: model["block"]["sequence_mixer"]["rope"].update(scaling={"factor": 8}),
        lambda model: model["block"]["sequence_mixer"]["rope"].update(no_global_rope=True),
        lambda model: model["block"]["sequence_mixer"]["rope"].update(name="complex"),
        lambda model: model["block"]["sequence_mixer"].update(clip_qkv=8.0),
        lambda model: model["block"]["sequence_mixer"].update(a_new_setting=1),
        lambda model: model["block"].update(attention_residual_alpha=0.5),
        lambda model: model.update(embed_scale=4.0),
        lambda model: model.update(name="normalized"),
    ],
)
def test_settings_without_a_counterpart_are_named(run: Path, change: Any) -> None:
    settings = json.loads((run / "step2/config.json").read_text())
    change(settings["model"])
    (run / "step2/config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="can't be compared") as raised:
        ckpt.plan(with_config(run), "hf")
    assert raised.value.hint and "save_hf_model" in raised.value.hint


@pytest.mark.parametrize("owner", ["sequence_mixer.qk_norm", "lm_head.layer_norm"])
def test_the_epsilon_of_every_norm_is_compared(run: Path, owner: str) -> None:
    settings = json.loads((run / "step2/config.json").read_text())
    module, norm = owner.split(".")
    ({**settings["model"], **settings["model"]["block"]})[module][norm]["eps"] = 1e-3
    (run / "step2/config.json").write_text(json.dumps(settings))
    with pytest.raises(CorruptError, match=r"rms_norm_eps 0\.001"):
        ckpt.plan(with_config(run), "hf")


def test_a_run_without_settings_says_so(run: Path) -> None:
    (run / "step2/config.json").unlink()
    assert any("not compared" in note for note in ckpt.plan(with_config(run), "hf").plan.target.notes)


def test_a_strange_tensor_has_no_place(run: Path) -> None:
    checkpoint = with_config(run)
    shutil.copy(run / "given/config.json", run / "step2/config.json")  # no settings to compare
    tensors = dict(checkpoint.tensors)
    tensors["blocks.0.attention.sinks", "weight"] = tensors["lm_head.norm.weight", "weight"]
    with pytest.raises(LossError, match="no place"):
        olmo_core.to_hub(replace(checkpoint, tensors=tensors))
