"""Empty placeholders in place of weights.

Under ZeRO-3 and FSDP, a rank's module holds empty tensors of shape [0] unless the weights are gathered.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ckpt.base.errors import CkptError, IncompleteError
from ckpt.base.text import pluralize
from ckpt.plan import registry
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, ReadRequest
from ckpt.runs.steps import trainer_steps

_PLACEHOLDER = (0,)
#: Modules use these suffixes for a tensor with shape [0] only next to other empty tensors.
_PARAMETERS = ("weight", "bias")
_GATHER = (
    "set stage3_gather_16bit_weights_on_model_save (Accelerate: zero3_save_16bit_model) to save whole weights, "
    "or give the folder of the DeepSpeed checkpoint (global_stepN)"
)


def check_has_elements(checkpoint: Checkpoint) -> None:
    """Raise IncompleteError if the model has no element, or has empty placeholders as weights.

    Placeholders are allowed if the format's files record shapes.
    """
    sizes = [tensor.numel for (_, role), tensor in checkpoint.tensors.items() if role in MODEL_ROLES]
    if len(sizes) > 1 and not any(sizes) and not _placeholders(checkpoint):
        what = f"none of {pluralize(len(sizes), 'tensor')} has an element: these are not weights"
        raise IncompleteError(what, path=checkpoint.path, fqn=next(iter(checkpoint.tensors))[0])
    if registry.get(checkpoint.format).records_shapes or not (empty := _placeholders(checkpoint)):
        return
    names = {fqn for fqn, role in checkpoint.tensors if role in MODEL_ROLES}
    place = _checkpoint_with_weights(Path(checkpoint.path), empty)
    what = f"{len(empty)} of {pluralize(len(names), 'tensor')} {'are' if len(empty) > 1 else 'is'} empty: "
    raise IncompleteError(
        f"{what}placeholders of ZeRO-3 or FSDP, saved without the weights"
        if place is None
        else f"{what}ZeRO-3 placeholders; the weights are in {place}",
        path=checkpoint.path,
        fqn=empty[0],
        expected="the elements for each weight",
        found="shape [0]",
        hint=_GATHER if place is None else f"give {place}",
    )


def _placeholders(checkpoint: Checkpoint) -> list[str]:
    shapes = {fqn: tensor.shape for (fqn, role), tensor in checkpoint.tensors.items() if role in MODEL_ROLES}
    empty = [fqn for fqn, shape in shapes.items() if shape == _PLACEHOLDER and not _has_no_rows(fqn, shapes)]
    is_certain = checkpoint.is_adapter or any(fqn.endswith(_PARAMETERS) for fqn in empty)
    return empty if is_certain else []


def _has_no_rows(fqn: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return True for the bias of a layer without outputs."""
    owner, _, name = fqn.rpartition(".")
    return name == "bias" and shapes.get(f"{owner}.weight", (1,))[:1] == (0,) != shapes[f"{owner}.weight"]


def _checkpoint_with_weights(path: Path, names: Collection[str]) -> Path | None:
    """Return the DeepSpeed step with the weights, in the placeholders' folder or next to it."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, *trainer_steps(folder), folder.parent, *trainer_steps(folder.parent)):
        for one in registry.all_formats():
            if one.reads and one.always_has_optimizer and one.loads_from == "run":
                with suppress(CkptError):
                    if (found := one.find(place, None)) and one.read(found, ReadRequest()).holds(names):
                        return found
    return None
