"""A Hub on the loopback for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        running.configure(monkeypatch, tmp_path / "hf-home")
        if getattr(request, "param", "xet") == "xet":
            pytest.importorskip("hf_xet")
            monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
        else:
            monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        # read from the environment before; hf_xet has one server in a process
        for name, value in {"ENDPOINT": running.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield running
