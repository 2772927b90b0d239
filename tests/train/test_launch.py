"""What each process computes on, told from a double of torch.cuda; and the random states that go on."""

from __future__ import annotations

import os
import random
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
    """Starts rank 0 of some processes on a machine with some GPUs; returns the backend, the GPU, what others see."""

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
        ("auto", 8, 4, "cpu", CPU),  # as the tests say
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
