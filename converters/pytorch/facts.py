"""The facts about a source that only PyTorch formats' own writers understand."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.torchfile.values import Record


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What PyTorch formats' readers tell their writers, in `Checkpoint.facts`."""

    #: Whether it is a run's own state dict stored leaf by leaf (DCP); what loads it asks for these very leaves.
    is_state_dict: bool = False
    #: Paths of its model and optimizer, which the trainer asks for again: `("app", "model")`.
    model_at: Path_ = ("model",)
    optimizer_at: Path_ = ("optimizer",)
    #: One part of a tensor as torch has pickled it in files of ranks: each version does it its way.
    dtensor: Record | None = None
    #: The fqns of each flat parameter that FSDP1's optimizer has, in its order.
    flat_parameters: tuple[tuple[str, ...], ...] = ()
