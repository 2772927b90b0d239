"""Writes that reach the disk, as users' do; all other tests in this process only check fsync's descriptor."""

import os
import posix

import pytest


@pytest.fixture
def real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", posix.fsync)
