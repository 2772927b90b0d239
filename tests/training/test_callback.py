"""`ckpt/training`: `ckpt.TrainerCallback` in an HF Trainer run on a CPU."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import TrainerCallback as Theirs

import ckpt
from ckpt.compare import manifest
from ckpt.errors import StorageError, UsageError
from ckpt.move.files import staging_folder
from ckpt.training.after_save import AfterSave, carry_out
from tests.support.hub_server import HubServer
from tests.support.places import FIXTURES, REPOSITORY


def trained(output: Path, callback: Any, **options: Any) -> Trainer:
    """Train four steps and save two checkpoints."""
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    args = TrainingArguments(
        str(output),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(16, (4, 8))]
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return trainer


def test_each_checkpoint_is_converted_and_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt.training")
    run, out = tmp_path / "outputs", tmp_path / "outputs-hf"
    trainer = trained(run, ckpt.TrainerCallback(dtype="bf16"))
    assert sorted(os.listdir(out)) == ["checkpoint-2", "checkpoint-4"]
    assert ckpt.verify(out / "checkpoint-4").good
    held = trainer.model.state_dict()
    written = ckpt.open(out / "checkpoint-4")
    assert set(written) <= set(held)
    for name in written:
        assert torch.equal(torch.as_tensor(written[name][...]), held[name].to(torch.bfloat16)), name
    said = [record.getMessage() for record in caplog.records]
    assert [f"ckpt: {out / f'checkpoint-{step}'} is verified" in said for step in (2, 4)] == [True, True]
    assert f"ckpt: {run / 'checkpoint-2'} is whole" in said


def test_a_checkpoint_that_a_run_saves_again_is_converted_though_a_former_conversion_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted run loses its callback, resumes from an older step, and saves that step again."""

    def disk_is_full(*_: object) -> None:
        raise StorageError("no space on the disk")

    work = AfterSave(str(tmp_path / "checkpoint-2"), str(tmp_path / "out"), to="full")
    shutil.copytree(FIXTURES / "trainer-zero2/checkpoint-2", work.path)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(manifest, "make_manifest", disk_is_full)
        carry_out(work)
    assert staging_folder(Path(work.output)).is_dir()
    shutil.rmtree(work.path)
    shutil.copytree(FIXTURES / "trainer-zero2/checkpoint-2", work.path)
    carry_out(work)
    assert ckpt.verify(work.output).good and not staging_folder(Path(work.output)).exists()


def test_the_newest_checkpoint_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as server:
        server.configure(monkeypatch, tmp_path / "home")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        trained(tmp_path / "outputs", ckpt.TrainerCallback(push="org/name", output=tmp_path / "out"))
        pushed = server.tree("org/name")
    weights = (tmp_path / "out" / "checkpoint-4" / "model.safetensors").read_bytes()
    assert pushed["model.safetensors"] == weights


def test_what_fails_is_logged_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trained(tmp_path / "outputs", ckpt.TrainerCallback(to="zero3"))  # for how many ranks?
    assert trainer.state.global_step == 4
    warnings = [record.getMessage() for record in caplog.records if record.name == "ckpt.training"]
    assert len(warnings) == 2 and all("exit code 2: the source has no rank count" in text for text in warnings)
    assert sorted(os.listdir(tmp_path)) == ["outputs"]


def test_a_checkpoint_that_is_gone_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Removing(ckpt.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_save(args, state, control, **kwargs)
            if state.global_step == 2:
                (tmp_path / "outputs" / "checkpoint-2").rename(tmp_path / "moved")

    trained(tmp_path / "outputs", Removing(to=None))
    assert any("no such file or folder" in record.getMessage() for record in caplog.records)


def test_only_the_first_rank_does_it(tmp_path: Path) -> None:
    from types import SimpleNamespace

    callback = ckpt.TrainerCallback()
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(is_world_process_zero=False, global_step=1)
    callback.on_save(args, state, None)
    callback.on_train_end(args, state, None)
    assert os.listdir(tmp_path) == []


def test_it_is_a_callback_of_transformers_only_when_it_is_made() -> None:
    assert isinstance(ckpt.TrainerCallback(), Theirs) and isinstance(ckpt.TrainerCallback(), ckpt.TrainerCallback)
    with pytest.raises(UsageError, match="push needs a conversion"):
        ckpt.TrainerCallback(to=None, push="org/name")
    code = """
import sys
from ckpt import *
import ckpt, pydoc
pydoc.render_doc(ckpt)
assert hasattr(ckpt, "TrainerCallback") and "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    ckpt.TrainerCallback()
except ckpt.CkptError as error:
    print(error)
"""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "ckpt.TrainerCallback needs transformers, but it is not installed\n\nhint: pip install transformers\n"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtyp": "bf16"}, "did you mean dtype"),
        ({"to": "hff"}, "did you mean hf"),
        ({"keep": 0}, "positive integer"),
        ({"dtype": "bf61"}, "did you mean bf16"),
        ({"to": "megatron", "tp": "x"}, "tp cannot be 'x'"),
        ({"max_shard_size": "5"}, "needs a unit"),
    ],
)
def test_wrong_options_are_refused_before_training(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ckpt.TrainerCallback(**wrong)


def test_right_options_are_taken() -> None:
    for right in (
        {},
        {"dtype": "bfloat16"},
        {"to": None},
        {"to": "zero3", "world_size": 2},
        {"to": "megatron", "tp": 2},
    ):
        ckpt.TrainerCallback(**right)  # type: ignore[arg-type]


def test_so_many_conversions_are_kept(tmp_path: Path) -> None:
    trained(tmp_path / "outputs", ckpt.TrainerCallback(keep=1, output=tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == ["checkpoint-4"]
    assert {"checkpoint-2", "checkpoint-4"} <= {*os.listdir(tmp_path / "outputs")}, "the run's own stay"
