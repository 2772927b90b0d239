"""Tensors that no cast may touch: parts of quantized weights, buffers, and float32 tensors of a model's class.

A quantized weight also needs all of its parts, and a target that supports them.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt.base.errors import CkptError, LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import BUFFER, FIXED, HUB, PART, WEIGHT, Checkpoint, Format, Layout, Target

_MAX_SHOWN = 3


def quantized_parts(checkpoint: Checkpoint) -> frozenset[str]:
    return services.quantization.quantized_weights(checkpoint).parts


def check_parts(checkpoint: Checkpoint) -> None:
    """Raise LossError if a quantized weight has missing, unexpected or misshapen parts."""
    if error := parts_error(checkpoint, LossError):
        raise error


def parts_error(checkpoint: Checkpoint, kind: type[CkptError], *, reads: bool = True) -> CkptError | None:
    """Return an error for missing, unexpected and misshapen parts. Without `reads`, no tensor is read."""
    faults = services.quantization.quantized_weights(checkpoint, reads=reads).faults
    if not faults:
        return None
    more = len(faults) - _MAX_SHOWN
    return kind(
        "quantized weights are not complete, so no loader would compute them right",
        path=checkpoint.path,
        fqn=faults[0].fqn,
        expected="every quantized weight with exactly the parts of its method",
        found="; ".join(map(str, faults[:_MAX_SHOWN])) + (f"; and {more} more" if more > 0 else ""),
        hint="`ckpt check` lists all faults; download or copy the folder again",
    )


def dequantizing_hint(checkpoint: Checkpoint) -> str:
    if services.dequantizing.can_dequantize(checkpoint):
        return Message("{dequantize=True} makes plain weights of them")
    return "take the full-precision model: this quantization method can't be dequantized here"


def check_place(checkpoint: Checkpoint, target: Format) -> None:
    """Raise LossError if a quantized model is converted to a format that trains plain weights.

    A run trained on a quantized base may keep it.
    """
    weights = services.quantization.quantized_weights(checkpoint)
    if target.namespace == HUB and weights.unwritable:
        hint = "copy the folder as it is"
        raise LossError(
            f"{target.name} would lose the quantized weights", path=checkpoint.path, found=weights.unwritable, hint=hint
        )
    source = registry.get(checkpoint.format) if checkpoint.format in registry.names() else target
    is_run = bool(checkpoint.optimizer_states) or (source.carries_optimizer and not source.carries_quantized)
    if target.carries_quantized or is_run or not (parts := weights.parts):
        return
    raise LossError(
        f"{target.name} has no place for quantized weights",
        path=checkpoint.path,
        fqn=min(parts),
        expected="weights in bf16, fp16 or fp32",
        found=f"{pluralize(len(parts), 'part')} of quantized weights",
        hint=dequantizing_hint(checkpoint),
    )


def with_uncast_parts(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Exclude quantized weights' parts from casts. Raise LossError if `--dtype` is given and the parts are unknown."""
    weights = services.quantization.quantized_weights(checkpoint)
    if layout.dtype is not None and weights.unproved:
        raise LossError(
            Message("{dtype} might cast parts of quantized weights and change the weights"),
            path=checkpoint.path,
            found=weights.unproved,
            hint=Message("leave {dtype} out"),
        )
    return replace(checkpoint, uncast={**checkpoint.uncast, **dict.fromkeys(weights.parts, PART)})


def check_casts(checkpoint: Checkpoint, target: Target) -> None:
    parts = quantized_parts(checkpoint)
    for slot in (slot for file in target.files for slot in file.slots) if parts else ():
        tensor = checkpoint.tensors.get(slot.key)
        if tensor is not None and tensor.fqn in parts and slot.extent.dtype != tensor.dtype:
            raise LossError(
                "a part of a quantized weight would be cast, and this would change the weight",
                path=checkpoint.path,
                fqn=tensor.fqn,
                expected=tensor.dtype,
                found=slot.extent.dtype,
                hint=dequantizing_hint(checkpoint),
            )


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
    with_role = (one._replace(role=BUFFER) if one.fqn in found else one for one in checkpoint.tensors.values())
    tensors = {tensor.key: tensor for tensor in with_role} if found else checkpoint.tensors
    return replace(checkpoint, tensors=tensors, has_all_buffers=services.tensor_kinds.is_known(checkpoint))
