"""Writes that reach the disk, as users' do; all other tests in this process skip fsync."""

import os
import posix

import pytest


@pytest.fixture(autouse=True)
def real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", posix.fsync)
