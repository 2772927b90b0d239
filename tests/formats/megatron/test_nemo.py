"""`converters/megatron/dist/format.py`, `read.py`, `checkpoint.py`: checkpoints of NeMo 2.

By hand, as the index has no NeMo: files that megatron-core wrote, with NeMo's prefix before the model's keys, in its
folders (nemo/lightning/ckpt_utils.py, io/pl.py, megatron_parallel.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import NotFoundError
from ckpt.plan.checkpoint import WEIGHT
from tests.support import commands
from tests.support.dcp_keys import rename_keys
from tests.support.describing import content
from tests.support.places import FIXTURES

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
        assert any("NeMo 2: its training state is left out" in note for note in checkpoint.notes)


def test_the_hub_gets_what_megatron_lm_would_have_given(run: Path, tmp_path: Path) -> None:
    known, found = (tmp_path / name for name in ("known", "found"))
    for source, output in ((SOURCE, known), (run, found)):
        done = commands.ckpt("convert", "auto", "hf", source, "-o", output, "--config", SOURCE)
        assert done.code == 0, done.err
    assert commands.ckpt("verify", known, found).code == 0
    assert (found / "tokenizer.json").is_file()


def test_nothing_is_resumed(run: Path) -> None:
    """Megatron-LM's arguments are nowhere, and without them it does not load a run."""
    done = commands.ckpt("resume", run)
    assert done.code == 6 and "no checkpoint with an optimizer" in done.err, done.err
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def test_several_are_not_guessed_among(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / NAME, run / "checkpoints" / "model--step=1")
    with pytest.raises(NotFoundError, match="several checkpoints of NeMo 2") as caught:
        ckpt.open(run)
    assert NAME in str(caught.value.hint)
    assert ckpt.open(run / "checkpoints" / "model--step=1").format == "megatron-dist"


def test_an_adapter_is_refused_by_its_name(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / NAME / "weights" / "adapter_metadata.json").write_text('{"model_ckpt_path": "base"}')
    for command in (("convert", "auto", "peft"), ("merge-lora",)):
        done = commands.ckpt(*command, run, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (NotFoundError.exit_code, False)
        assert "an adapter of NeMo 2" in done.err and "target='hf-peft'" in done.err
