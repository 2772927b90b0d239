"""`ckpt/training/watched.py`: `Watched` in a plain HF Trainer script: its heartbeats, and a detected spike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt.training.watched import Watched
from tests.support.places import REPOSITORY


def test_a_script_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    rows = torch.arange(16).repeat(30, 1)
    rows[25:] = torch.randint(16, (5, 16))  # unseen data
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    args = TrainingArguments(
        str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=args, train_dataset=data, callbacks=[Watched(beat=0.1)]).train()

    beat = json.loads((tmp_path / "heartbeats" / "rank-0.json").read_text())
    assert (beat["phase"], beat["step"], beat["world_size"]) == ("done", 30, 1) and beat["beats"] >= 2
    first = json.loads((tmp_path / "spikes.jsonl").read_text().splitlines()[0])
    assert first["step"] == 26 and first["loss"] > first["limit"]
    assert "warning: the loss spiked in step 26: " in capsys.readouterr().err
    command = [sys.executable, "-m", "ckpt", "watch", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
