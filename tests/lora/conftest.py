"""Base models for adapters, and one adapter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.adapters import BF16, MODELS, save_adapter, save_base


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {model: save_base(model, BF16, folder / model) for model in MODELS}


@pytest.fixture(scope="session")
def linear(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    return save_adapter(bases["llama"], folder / "adapter", {"target_modules": ["q_proj", "down_proj"]})


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of a class unknown to transformers."""
    from tests.lora.test_kinds import Layers  # pytest must rewrite its assertions first

    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    save_file(Layers().state_dict(), folder / "model.safetensors")
    return folder
