"""Comparison between a description and the truth from an engine."""

from __future__ import annotations

from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.testing import content
from tests.support.engines import Truth


def assert_equals_truth(checkpoint: Checkpoint, truth: Truth) -> int:
    """Assert that description and truth have the same tensors, bit for bit.

    Stage 3 stores only masters of trainable parameters.
    """
    stored = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] not in truth.ties}
    assert not set(stored) - set(truth.tensors), "tensors that the engine does not know"
    for fqn, role in set(truth.tensors) - set(stored):
        assert role == WEIGHT and checkpoint.format == "zero3" and (fqn, MASTER) in stored, f"{fqn} {role} is missing"
    for key, tensor in stored.items():
        assert content(tensor) == truth.tensors[key], f"{key} differs from what the engine gathered"
    assert any(role == MASTER for _, role in stored)
    return len(stored)


def expected_weights(truth: Truth, fp32: bool) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the expected content of a weights-only folder, by the engine's names.

    Weights are the masters if `fp32` is set and there are any.
    """
    found = {}
    for (fqn, role), value in truth.tensors.items():
        if fqn in truth.ties or role not in (WEIGHT, BUFFER):
            continue
        if fp32 and role == WEIGHT:
            value = truth.tensors.get((fqn, MASTER)) or upcast(value)
        found[fqn] = value
    return found


def upcast(value: tuple[str, tuple[int, ...], bytes]) -> tuple[str, tuple[int, ...], bytes]:
    """Return a frozen weight in float32, computed by torch."""
    import torch

    name, shape, data = value
    bits = torch.tensor(list(data), dtype=torch.uint8)
    tensor = bits.view(getattr(torch, name)).reshape(shape).float()
    return "float32", shape, tensor.numpy().tobytes()
