"""What the benchmarks do where something to compare with is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import hash_peer, hashing
from benchmarks.measure import Measured, Run
from benchmarks.runner import Bench


@pytest.mark.parametrize("lacking", [(), ("blake3",), ("blake3", "xxhash")])
def test_digests_are_compared_with_what_there_is(
    lacking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without b3sum and blake3, which ckpt does not need, the section has its table and says what is not there."""
    run = Run(1.0, 1.0, 10.0)
    monkeypatch.setattr(hash_peer.shutil, "which", lambda name: None)
    monkeypatch.setattr(hash_peer, "find_spec", lambda name: None if name in lacking else find_spec("json"))
    monkeypatch.setattr(hashing, "run", lambda case: run)
    monkeypatch.setattr(Bench, "source", lambda self, kind: tmp_path)
    monkeypatch.setattr(Bench, "rounds", lambda self, cases: {case.name: Measured(case, (run,)) for case in cases})
    table = str(hashing.measure(Bench(tmp_path, 1, 1)))
    assert ("b3sum, zero3" in table) == ("blake3" not in lacking)
    assert ("xxhsum, zero3" in table) == ("xxhash" not in lacking)
    assert table.count("no comparison with it (pip install ") == len(lacking)
    assert "ckpt hash, hf" in table
