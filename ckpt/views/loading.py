"""Loading of a checkpoint's weights into a torch module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.base.errors import LossError, NotFoundError, UsageError, shown
from ckpt.base.text import pluralize
from ckpt.move.casts import too_large
from ckpt.plan.checkpoint import BUFFER, HUB, MASTER, MODEL_ROLES, TRANSFORMERS, WEIGHT, Checkpoint
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.precision import CAST_SOURCES, choose
from ckpt.plan.tensors import Tensor
from ckpt.runs.opening import AUTO, open_checkpoint, rank_copies_note, warn_of_skipped
from ckpt.state.naming import to_namespace
from ckpt.views.lazy import LazyTensor, becomes_infinite
from ckpt.views.without_torch import needs_torch

if TYPE_CHECKING:
    import torch

_SHOWN = 5


def load_into(
    model: torch.nn.Module, source: str | Path | Checkpoint, format: str = AUTO, *, strict: bool = True
) -> list[str]:
    """Fill the parameters and persistent buffers of `model` in place, from a checkpoint in any format.

    Names follow the model's state dict. If the checkpoint has other names (the Hub's, Megatron's), its config relates
    them. A parameter takes the stored weight in its own dtype, otherwise the float32 master, rounded to nearest even if
    the parameter is narrower. Only one tensor is in memory at a time. Return missing names; they keep their values.

    Raise UsageError for a sharded model or one without memory (meta), LossError if names, shapes or kinds of dtype do
    not match or a number is too large for its parameter, and the errors of `ckpt.open`.

    Args:
        model: The torch module to fill.
        source: A path, a URL or the result of `ckpt.open`.
        format: The format to read; `auto` finds it.
        strict: Raise an error if names are missing on either side.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise needs_torch("ckpt.load_into") from None

    if not isinstance(model, torch.nn.Module):
        raise UsageError("this is not a torch module", expected="torch.nn.Module", found=type(model).__name__)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, format)
    warn_of_skipped(checkpoint)
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    _check_plain(wanted)
    named = _with_matching_names(checkpoint, wanted)
    missing = [fqn for fqn in wanted if stored_for(named, fqn, None) is None]
    known = {named.ties.get(fqn, fqn) for fqn in wanted} | wanted.keys()
    extra = sorted({fqn for fqn, role in named.tensors if role in MODEL_ROLES} - known)
    if ((missing or extra) and strict) or len(missing) == len(wanted):
        raise LossError(
            "the checkpoint and the model do not have the same tensors",
            path=checkpoint.path,
            expected=f"{pluralize(len(wanted), 'tensor')}; not in the checkpoint: {_sample_names(missing)}",
            found=f"not in the model: {_sample_names(extra)}",
            hint="strict=False fills what both have" if len(missing) < len(wanted) else "is it the same model?",
        )
    if untied := [fqn for fqn, owner in named.ties.items() if fqn in wanted and wanted[fqn] is not wanted.get(owner)]:
        what = (
            f"{_sample_names(untied)}: tied to {named.ties[untied[0]]} in the checkpoint, and a copy of it in the model"
        )
        warnings.warn(f"{shown(checkpoint.path)}: {what}", stacklevel=2)
    filled = {fqn: _checked(named, fqn, tensor) for fqn, tensor in wanted.items() if fqn not in missing}
    if note := rank_copies_note(filled.values()):
        warnings.warn(f"{shown(checkpoint.path)}: {note}", stacklevel=2)
    with torch.no_grad():
        for fqn, stored in filled.items():
            value = LazyTensor(stored, named.computed)[...]
            wanted[fqn].copy_(
                value if value.dtype == wanted[fqn].dtype else _rounded(value, wanted[fqn], checkpoint, fqn)
            )
    return missing


def _rounded(value: torch.Tensor, target: torch.Tensor, of: Checkpoint, fqn: str) -> torch.Tensor:
    found = value.to(target.dtype)
    if becomes_infinite(value, found):
        dtype = BY_NAME[str(found.dtype).removeprefix("torch.")]
        raise too_large(dtype, "load it into a wider dtype of torch", path=of.path, fqn=fqn)
    return found


def _check_plain(wanted: Mapping[str, torch.Tensor]) -> None:
    for fqn, tensor in wanted.items():
        if tensor.is_meta or hasattr(tensor, "placements"):
            raise UsageError(
                "the model has no memory to be filled" if tensor.is_meta else "the model is sharded already",
                fqn=fqn,
                found="a meta tensor" if tensor.is_meta else type(tensor).__name__,
                hint="model.to_empty(device=...) first" if tensor.is_meta else "fill it before it is sharded",
            )


def _with_matching_names(checkpoint: Checkpoint, wanted: Mapping[str, object]) -> Checkpoint:
    """Choose the namespace with the most matches: its own, transformers' or the Hub's."""

    def matches(one: Checkpoint) -> int:
        names = {fqn for fqn, _ in one.tensors} | one.ties.keys()
        return len(names & wanted.keys())

    best = checkpoint
    for namespace in (TRANSFORMERS, HUB) if checkpoint.config else ():
        if matches(best) == len(wanted):
            break
        try:
            other = to_namespace(checkpoint, namespace)
        except (LossError, NotFoundError, UsageError):  # this namespace is not available
            continue
        best = max(best, other, key=matches)
    return replace(best, notes=())


def stored_for(checkpoint: Checkpoint, fqn: str, dtype: DType | None) -> Tensor | None:
    """Let `dtype` decide between a weight and a master."""
    for name in (fqn, checkpoint.ties.get(fqn, fqn)):
        weight, master = checkpoint.get(name, WEIGHT), checkpoint.get(name, MASTER)
        if weight or master:
            return choose(weight, master, dtype).tensor
        if buffer := checkpoint.get(name, BUFFER):
            return buffer
    return None


def _checked(checkpoint: Checkpoint, fqn: str, tensor: torch.Tensor) -> Tensor:
    name = str(tensor.dtype).removeprefix("torch.")
    floating = next((dtype for dtype in CAST_SOURCES if dtype.name == name), None)
    stored = stored_for(checkpoint, fqn, floating)
    assert stored is not None
    both_float = floating is not None and stored.dtype in CAST_SOURCES
    if stored.shape != tuple(tensor.shape) or not (both_float or stored.dtype.name == name):
        raise LossError(
            "a checkpoint tensor does not fit the model",
            path=checkpoint.path,
            fqn=fqn,
            expected=f"{name} {list(tensor.shape)}",
            found=f"{stored.dtype} {list(stored.shape)}",
        )
    return stored


def _sample_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) + more) or "none"
