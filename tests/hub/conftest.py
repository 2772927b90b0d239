"""A Hub on the loopback for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
        yield running
