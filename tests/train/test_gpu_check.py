"""`make gpu-check` on a double of torch.cuda: everything in it but the GPU."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests import gpu_check
from tests.support import engines


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err.startswith("no GPU that torch")


@pytest.mark.slow
def test_with_a_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "jobs.jsonl"
        file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        preload = ["train.engines.zero", "train.engines.native", "tests.support.fake_cuda"]
        engines.fork([(ranks, "train.__main__", ["--device", "cuda", "--jobs", str(file)])], preload)

    installed = importlib.util.find_spec
    monkeypatch.setattr(gpu_check, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "double")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else installed(name))
    cases = ("ddp, fused", "zero2, torch's fused AdamW")
    code = gpu_check.main([str(tmp_path / "out"), "--only", *cases])
    printed = capsys.readouterr().out
    assert code == 0 and "2 tried, 0 failed" in printed, printed
    assert re.search(r"left out, megatron-core is not installed: megatron\n", printed)
    rows = {name: next(line for line in printed.splitlines() if line.startswith(name)) for name in cases}
    for name, truth in zip(cases, (33, 31), strict=True):
        assert "ranks: 2, resumed: equal" in rows[name] and f"truth: {truth} tensors" in rows[name], rows[name]
        assert re.search(r"tags: [^,]*cuda:0.*random states: cpu cuda", rows[name]), rows[name]
    kept = tmp_path / "out" / "fixtures"
    assert (kept / "zero2-torchs-fused-AdamW-cuda" / "global_step4").is_dir()
    assert json.loads((kept / "about.json").read_text())["GPU"] == "double"
    assert ckpt.open(kept / "ddp-fused-cuda").state.step == 4


def test_memory_stands_beside_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 1000}

    def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
        output = Path(jobs[0]["output"])
        output.mkdir(parents=True)
        (output / "config.json").write_text(json.dumps(config))
        (output / "memory.json").write_text(json.dumps([{"allocated": 7_000_000}, {"allocated": 9_000_000}]))

    monkeypatch.setattr(gpu_check, "train", train)
    shown = gpu_check.measure("zero2", 2, tmp_path)
    assert re.fullmatch(r"9\.0 MB, estimated [\d.]+ MB \([\d.]+ MB of buffers\)", shown), shown
