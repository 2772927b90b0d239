"""`make gpu-check` on the torch.cuda double: everything in it but the GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import open as ckpt_open
from examples.demo import __main__ as demo
from tests import gpu_check
from tests.support import engines
from tests.support.commands import ckpt
from tests.support.kept import make_once
from train import config

DOUBLE = "tests.support.fake_cuda"
MEGATRON = "tests.support.megatron_imports"
LLAMA = "transformers.models.llama.modeling_llama"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("no GPU that torch") and "has never run on one\nhint: make gpu-check DOUBLE=2" in said


@pytest.mark.parametrize("ranks", range(1, 9))
def test_batches_divide_among_the_gpus(ranks: int, tmp_path: Path) -> None:
    case = gpu_check.CASES["ddp"]
    assert not any(job["batch"] % ranks for job in gpu_check.runs(case, ranks, tmp_path, set()))
    assert not config.Config().batch % min(ranks, 4), "the demo's"


def test_a_demo_that_took_the_cpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "run", lambda *words: f"{words[-1]} processes")
    with pytest.raises(gpu_check.CheckError, match="not on a GPU"):
        gpu_check.demo(8)


#: Count of truth tensors compared with a conversion's full state dict; None if no count is checked.
COMPARED = {
    "zero1": 31,
    "zero2": 31,
    "zero3": 30,
    "zero2, torch's fused AdamW": 31,
    "zero2, FusedAdam": 31,
    "ddp": 33,
    "ddp, fused": 33,
    "fsdp1": 33,
    "fsdp2": 33,
    "fsdp2, fused": 63,
    "fsdp2, a file a rank": None,
    "hsdp": 33,
    "tp-fsdp": 63,
    "megatron": None,
    "megatron-deepspeed": None,
}


#: The demo's training job.
DEMO = {"strategy": "zero3", "model": "llama", "steps": 20, "truth": True}


@pytest.mark.slow
def test_with_a_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
        """Train all runs in one start, on the first call."""
        if (tmp_path / "jobs.jsonl").exists():
            return
        named = gpu_check.CASES.items()
        runs = [gpu_check.runs(case, ranks, gpu_check.folder_of(out, name), set()) for name, case in named]
        runs.append([gpu_check.large_run("fsdp2", ranks, out / "memory-fsdp2")])
        runs.append([DEMO | {"output": str(tmp_path / "trained")}])
        assert jobs == runs[0]
        lines = "".join(json.dumps(job) + "\n" for run in runs for job in run)
        engines_used = ["zero", "native", "pipeline"]
        preload = [*(f"train.engines.{name}" for name in engines_used), MEGATRON, LLAMA, DOUBLE]

        def make() -> None:
            (tmp_path / "jobs.jsonl").write_text(lines)
            engines.fork(
                [(ranks, "train.__main__", ["--device", "cuda", "--jobs", str(tmp_path / "jobs.jsonl")])], preload
            )

        make_once(tmp_path, ("train.__main__", DOUBLE), lines, make)

    def run(*words: str | Path) -> str:
        if words[:2] == ("-m", "examples.demo"):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                demo.main([*map(str, words[2:])])
            return printed.getvalue()
        assert words[:2] == ("-m", "ckpt")
        done = ckpt(*words[2:])
        if done.code:
            raise gpu_check.CheckError(done.err)
        return done.out

    def run_of_demo(command: list[str]) -> None:
        """Run one demo command. The training output is already there."""
        if Path(command[0]).name == "ckpt":
            assert ckpt(*command[1:]).code == 0
            return
        assert command[1:7] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "train"]
        parser = config.Parser()
        config.add_options(parser)
        assert config.parse_options(parser.parse_args(command[7:])) == config.Config(**DEMO)
        (tmp_path / "trained").rename("demo-outputs")

    monkeypatch.setattr(gpu_check, "train", train)
    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(demo, "run", run_of_demo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "MEASURED", ("fsdp2",))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "double")
    code = gpu_check.main([str(out), "--only", *COMPARED, "memory", "demo"])
    printed = capsys.readouterr().out
    assert code == 0 and f"{len(COMPARED) + 2} tried, 0 failed" in printed, printed
    assert "left out" not in printed and "MB of buffers" in printed
    about = json.loads((out / "fixtures" / "about.json").read_text())
    assert about["GPU"] == "double"
    shown = about["outcomes"]["demo"]
    assert (shown["ranks"], shown["tags"]) == ("2", "cuda:0 cuda:1") and shown["printed"].startswith("all right")
    for name, number in COMPARED.items():
        cells = about["outcomes"][name]
        assert (cells["ranks"], cells["resumed"], cells["random states"]) == ("2", "equal", "cpu cuda"), name
        assert cells.get("truth") == (number and f"{number} tensors"), name
        saving = {"cuda:0"} if name.startswith("ddp") else {"cuda:0", "cuda:1"}
        assert saving <= set(cells["tags"].split()), name
        assert (out / "fixtures" / f"{gpu_check.folder_of(out, name).name}-cuda" / "truth").is_dir()
    assert ckpt_open(out / "fixtures" / "ddp-fused-cuda").state.step == 4


def test_what_cannot_be_tried_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one GPU, no megatron-core and a failing case, all other cases still run."""

    def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
        raise gpu_check.CheckError(f"out of memory on {ranks}")

    installed = importlib.util.find_spec
    monkeypatch.setattr(gpu_check, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "double")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else installed(name))
    assert gpu_check.main([str(tmp_path / "out"), "--only", *COMPARED, "memory"]) == 1
    printed = capsys.readouterr().out
    assert "left out, megatron-core is not installed: megatron, demo\n" in printed
    assert "left out, 1 GPUs are no even number: hsdp, tp-fsdp\n" in printed
    assert re.search(r"^zero3  +FAILED CheckError: out of memory on 1$", printed, re.MULTILINE)
    number = len(COMPARED) - 3 + len(gpu_check.MEASURED)
    assert f"{number} tried, {number} failed" in printed


def test_memory_stands_beside_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 1000}

    def train(jobs: list[dict[str, Any]], ranks: int, folder: Path) -> None:
        output = Path(jobs[0]["output"])
        output.mkdir(parents=True)
        (output / "config.json").write_text(json.dumps(config))
        line = {"ranks": {"memory_bytes": [7_000_000, 9_000_000]}}
        (output / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    monkeypatch.setattr(gpu_check, "train", train)
    shown = gpu_check.measure("zero2", 2, tmp_path)
    assert re.fullmatch(r"9\.0 MB, estimated [\d.]+ MB \([\d.]+ MB of buffers\)", shown), shown
