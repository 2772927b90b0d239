"""`checkpoint["fqn"][...]` against the truth, in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt.errors import UsageError
from tests.support.engines import raw


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_tensors(fixtures: Path, stage: int) -> None:
    from safetensors import safe_open

    run = fixtures / f"toy-zero{stage}"
    checkpoint = ckpt.open(run)
    with safe_open(run / "truth" / "global_step2.safetensors", "pt") as truth:
        checked = 0
        for fqn, role in checkpoint.tensors:
            expected = truth.get_tensor(f"{role}/{fqn}")
            lazy = checkpoint[fqn, role]
            assert raw(lazy[...]) == raw(expected)
            if expected.ndim and expected.numel():
                assert raw(lazy[1:3]) == raw(expected[1:3])
                assert raw(lazy[-1]) == raw(expected[-1])
                assert raw(lazy[..., 0]) == raw(expected[..., 0])
            if expected.ndim > 1 and expected.numel():
                assert raw(lazy[0, 1:]) == raw(expected[0, 1:])
            checked += 1
        assert checked == len(checkpoint.tensors)


def test_a_parameter_is_found_by_name_or_alias(fixtures: Path) -> None:
    checkpoint = ckpt.open(fixtures / "toy-zero3")
    assert checkpoint["embed.weight"].dtype == "float32"
    assert raw(checkpoint["head.weight"][...]) == raw(checkpoint["embed.weight"][...])
    with pytest.raises(KeyError):
        checkpoint["nothing"]


def test_indices_that_cannot_be_read(fixtures: Path) -> None:
    lazy = ckpt.open(fixtures / "toy-zero3")["embed.weight"]
    with pytest.raises(IndexError):
        lazy[10**6]
    with pytest.raises(UsageError):
        lazy[::2]
    with pytest.raises(UsageError):
        lazy[0, 0, 0]
