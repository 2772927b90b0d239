"""One deliberately changed byte: DeepSpeed, PEFT, torch's DCP and Megatron-core agree with `ckpt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.peers import PEERS, found


@pytest.mark.parametrize("name", PEERS)
def test_both_sides_see_the_same_byte(name: str, tmp_path: Path) -> None:
    result = found(PEERS[name], tmp_path)
    assert result.num_tensors > 1
    assert result.num_equal == result.num_equal_changed == result.num_tensors
    assert result.theirs == result.ours != set()
    assert len(result.ours) < result.num_tensors
