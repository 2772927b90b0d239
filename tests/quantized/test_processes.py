"""`converters/quantized/quantize.py`, `converters/gguf/quantize.py`: the same bytes from any processes and workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError
from ckpt.move.file_pieces import deal, pieces_of, units_of
from ckpt.move.workers import Resources
from ckpt.plan.checkpoint import Layout
from ckpt.processes.forks import Forkable
from converters.quantized._packed_weight import ELEMENTS
from tests.quantized.test_quantize import METHODS, saved
from tests.support.commands import contents
from tests.support.engines import fork
from tests.support.places import FIXTURES

SIZES: dict[str, Any] = {
    "vocab_size": 276,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
CASES = [
    *(("llama", "hf", method) for method in METHODS),
    *(("llama", "gguf", "q8_0"), ("gpt_oss", "hf", "mxfp4"), ("gpt_oss", "gguf", "mxfp4")),
]
WORKER = "tests.quantized.processes_worker"
PRELOADED = ["ckpt.api", "converters.huggingface.hf", "converters.quantized.quantize", "converters.gguf.write"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantize weights of several blocks by two and by three processes, and return the folder with all outputs."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(4)
    experts = GptOssConfig(**SIZES, intermediate_size=3072, num_local_experts=2, num_experts_per_tok=2)
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=10240))),
        ("gpt_oss", GptOssForCausalLM(experts)),
    ):
        assert max(one.numel() for one in model.parameters()) > ELEMENTS
        saved(model, folder / name)
        for file in (FIXTURES / "gguf" / name).glob("*token*"):
            shutil.copy(file, folder / name)
    fork([(ranks, WORKER, [json.dumps(CASES), str(folder)]) for ranks in (2, 3)], PRELOADED)
    return folder


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_workers_and_processes_do_not_change_the_bytes(
    case: tuple[str, str, str], folder: Path, tmp_path: Path
) -> None:
    (model, to, method), name = case, "-".join(case)
    for workers in (1, 2, 3, 4):
        ckpt.convert(folder / model, to, tmp_path / f"{workers}", quantize=method, workers=workers)
    alone = contents(tmp_path / "1")
    assert any(file.endswith((".safetensors", ".gguf")) for file in alone)
    others = [*(tmp_path / f"{workers}" for workers in (2, 3, 4)), *(folder / f"{ranks}/{name}" for ranks in (2, 3))]
    assert [other for other in others if contents(other) != alone] == []


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a command fork for any size, though torch is imported here. Return the list of its forks."""
    forks: list[int] = []

    def fork(real: Callable[[], int] = os.fork) -> int:
        forks.append(real())
        return forks[-1]

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(Resources, "num_processes", lambda *_: 3)
    return forks


@pytest.mark.parametrize(("to", "method"), [("hf", "fp8-block"), ("hf", "mxfp4"), ("gguf", "q8_0")])
def test_forks_do_not_change_the_bytes(to: str, method: str, folder: Path, tmp_path: Path, forks: list[int]) -> None:
    ckpt.convert(folder / "llama", to, tmp_path / "alone", quantize=method)
    assert not forks  # only a command forks
    ckpt.convert(folder / "llama", to, tmp_path / "shared", quantize=method, group=Forkable())
    assert len(forks) == 2 and contents(tmp_path / "shared") == contents(tmp_path / "alone")


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_processes_compute_nothing_twice(case: tuple[str, str, str], folder: Path) -> None:
    model, to, method = case
    plan = ckpt.plan(ckpt.open(folder / model), to, Layout(quantize=method)).plan
    pieces = {file.name: pieces_of(file, 4096) for file in plan.target.files}
    units = units_of(plan, pieces)
    shares = [part for rank in range(3) for part in deal(plan.target.files, pieces, pieces, "nnn", rank, units)]
    paths = [path for part in shares for path in part.computed_copies(plan)]
    assert sorted(paths) == sorted({*paths}) and {*paths} <= {*plan.checkpoint.computed}
    done = [piece for part in shares for piece in part.todo]
    assert sorted(done) == sorted(piece for inside in pieces.values() for piece in inside)


def test_stopped_with_forks_it_goes_on_without(folder: Path, tmp_path: Path, forks: list[int]) -> None:
    what: Any = {"quantize": "q8_0", "max_memory": 1 << 20}
    ckpt.convert(folder / "llama", "gguf", tmp_path / "alone", **what)
    done = 0

    def stop(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before <= 4 << 20 < done:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        ckpt.convert(folder / "llama", "gguf", tmp_path / "out", group=Forkable(), progress=stop, **what)
    assert "rerun the command to continue" in caught.value.__notes__[0] and len(forks) == 2
    assert not [one for one in forks if Path(f"/proc/{one}").exists()] and not (tmp_path / "out").exists()
    assert ckpt.convert(folder / "llama", "gguf", tmp_path / "out", **what).num_done
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_number_that_is_not_finite_is_the_same_error(folder: Path, tmp_path: Path, forks: list[int]) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "llama", model)
    [file] = model.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x80\x7f")
    said = []
    for group in (None, Forkable()):
        with pytest.raises(CorruptError) as caught:
            ckpt.convert(model, "hf", tmp_path / "out", quantize="fp8-dynamic", group=group)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_only_heavy_work_is_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ckpt.plan(ckpt.open(folder / "llama"), "hf", Layout(quantize="mxfp4")).plan
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("ckpt.move.workers.in_use", lambda: False)  # an earlier test may have left a store open
    assert Resources().num_processes(plan) == 1 < plan.computed_bytes < 64 << 20
    large = replace(plan, computed_bytes=1 << 30)
    assert [Resources().num_processes(large), Resources(workers=2).num_processes(large)] == [4, 1]
    assert Resources(max_memory=128 << 20).num_processes(large) == 2
    assert Resources().num_processes(replace(large, largest_computed=30 << 20)) == 3  # 150 MB each
    monkeypatch.setattr("ckpt.move.workers.in_use", lambda: True)
    assert Resources().num_processes(large) == 1, "forks can't share a store's connections"
