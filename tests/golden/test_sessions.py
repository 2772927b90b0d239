"""`ckpt/cli/parser.py`, `ckpt/runs/foreign_checkpoints.py`: terminal sessions with output and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.verbs import VERBS
from tests.support.sessions import GOLDEN, Session, play, sessions


@pytest.mark.parametrize("session", [one for file in sorted(GOLDEN.glob("*.txt")) for one in sessions(file)], ids=str)
def test_session(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(session, tmp_path, monkeypatch, VERBS)
