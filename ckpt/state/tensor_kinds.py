"""Buffers, and tensors that a model's class keeps in float32, if the architecture is known."""

from __future__ import annotations

from dataclasses import replace

from ckpt.plan import services
from ckpt.plan.checkpoint import BUFFER, FIXED, WEIGHT, Checkpoint, Layout


def with_tensor_kinds(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Give known buffers their role, and exclude them and float32 tensors from casts."""
    if checkpoint.is_adapter:
        return checkpoint
    run = checkpoint.computes_in
    dtype = layout.dtype or (run and run.dtype)
    fixed = services.tensor_kinds.float32(checkpoint, dtype) if dtype else ()
    return replace(_with_buffers(checkpoint), uncast={**checkpoint.uncast, **dict.fromkeys(fixed, FIXED)})


def _with_buffers(checkpoint: Checkpoint) -> Checkpoint:
    """Keep the source's roles if it has buffers. A tensor in the optimizer is a parameter."""
    if any(True for _ in checkpoint.with_role(BUFFER)):
        return replace(checkpoint, has_all_buffers=True)
    state = checkpoint.state
    trained = {fqn for fqn, role in checkpoint.tensors if role != WEIGHT}
    trained.update(*(group.fqns for group in state.param_groups), *state.scalars.values())
    found = services.tensor_kinds.buffers(checkpoint) - trained
    with_role = (replace(one, role=BUFFER) if one.fqn in found else one for one in checkpoint.tensors.values())
    tensors = {tensor.key: tensor for tensor in with_role} if found else checkpoint.tensors
    return replace(checkpoint, tensors=tensors, has_all_buffers=services.tensor_kinds.is_known(checkpoint))
