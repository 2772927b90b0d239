"""Each process's device, with a double for torch.cuda; and restored random states."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from train import launch, randomness
from train.config import UserError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts rank 0 on a machine with some GPUs and returns backend, GPU and visible devices."""

    def start(device: str, num_gpus: int, num_processes: int, accelerator: str = "") -> tuple[str, int | None, str]:
        chosen: list[int] = []
        joined: list[str] = []
        environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(num_processes), "CUDA_VISIBLE_DEVICES": "all"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DS_ACCELERATOR", accelerator) if accelerator else monkeypatch.delenv("DS_ACCELERATOR")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
        launch.start(device)
        assert launch.on_gpu() == bool(chosen)
        return joined[0], chosen[0] if chosen else None, os.environ["CUDA_VISIBLE_DEVICES"]

    return start


GPU, CPU = ("nccl", 1, "all"), ("gloo", None, "")


@pytest.mark.parametrize(
    ("device", "num_gpus", "num_processes", "accelerator", "expected"),
    [
        ("auto", 0, 4, "", CPU),
        ("auto", 1, 4, "", CPU),
        ("auto", 2, 4, "", CPU),
        ("auto", 2, 2, "", GPU),
        ("auto", 8, 4, "", GPU),
        ("auto", 8, 4, "cpu", CPU),  # the tests' setting
        ("cpu", 8, 4, "", CPU),
        ("cuda", 8, 8, "cpu", GPU),
    ],
)
def test_the_device(
    started: Any, device: str, num_gpus: int, num_processes: int, accelerator: str, expected: Any
) -> None:
    assert started(device, num_gpus, num_processes, accelerator) == expected
    assert os.environ.get("DS_ACCELERATOR") == (None if expected is GPU else "cpu")


@pytest.mark.parametrize(("num_gpus", "hint"), [(2, "--nproc-per-node 2, or --device cpu"), (0, "--device cpu")])
def test_too_few_gpus_for_what_is_asked(started: Any, num_gpus: int, hint: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)4 processes on this machine.* sees {num_gpus} GPUs\nhint: {hint}$"):
        started("cuda", num_gpus, 4)


def test_random_states_of_cpu_and_gpu_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator()
    monkeypatch.setattr(launch, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def draw() -> list[float]:
        return [random.random(), np.random.random(), *torch.rand(1).tolist(), *torch.rand(1, generator=gpu).tolist()]

    randomness.save(tmp_path / "states")
    drawn = draw()
    assert draw() != drawn
    assert randomness.load(tmp_path / "states") and draw() == drawn
    saved = torch.load(tmp_path / "states" / "rng_state_1.pth", weights_only=False)
    assert saved.keys() == {"python", "numpy", "cpu", "cuda"}  # HF Trainer's
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert not randomness.load(tmp_path / "states"), "another rank's states are not taken"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a function that ends ranks, one thread each, in order, with an error or None; it returns their output."""
    own = threading.local()
    monkeypatch.setattr(launch, "_PATIENCE", 0.5)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: own.rank)

    def end(errors: dict[int, str], ranks: int) -> str:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: clients[own.rank])
        clients = {rank: dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False) for rank in range(ranks)}

        def leave(rank: int, text: str) -> None:
            own.rank = rank
            launch.tell(UserError(text))
            launch.tell(UserError(text))  # a repeat through an outer frame

        threads = [threading.Thread(target=leave, args=entry) for entry in errors.items()]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return capfd.readouterr().err

    return end


def test_an_error_of_all_ranks_is_shown_once(ended: Any) -> None:
    assert ended({1: "no", 0: "no", 2: "no"}, 3) == "train: error: no\n"


def test_an_error_of_another_rank_is_shown_with_its_rank_and_not_what_came_of_it(ended: Any) -> None:
    """Only rank 0 reported an error: its connection was closed."""
    assert ended({1: "no such file", 0: "connection closed"}, 2) == "train: error: rank 1: no such file\n"
    assert ended({1: "no such file"}, 3) == "train: error: rank 1: no such file\n"


def test_an_error_is_shown_where_the_store_has_gone_with_rank_0(
    monkeypatch: pytest.MonkeyPatch, ended: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    del store
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    launch.tell(UserError("no"))
    assert "train: error: rank 1: no\n" in capfd.readouterr().err


@pytest.mark.parametrize(("local_rank", "shown"), [("0", "train: error: no\n"), ("1", "")])
def test_before_the_ranks_have_met_each_node_shows_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, shown: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    launch.tell(UserError("no"))
    assert capsys.readouterr().err == shown
