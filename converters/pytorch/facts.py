"""Source facts for PyTorch formats' writers, passed in `Checkpoint.facts`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.torchfile.values import Record


@dataclass(frozen=True, slots=True)
class TorchFacts:
    #: True for a run's own state dict (DCP). The loader expects exactly these leaves.
    is_state_dict: bool = False
    #: Paths expected by the trainer: `("app", "model")`.
    model_at: Path_ = ("model",)
    optimizer_at: Path_ = ("optimizer",)
    #: True if the optimizer is flattened, and its loader expects that.
    is_flat: bool = False
    #: Each torch version pickles DTensors differently.
    dtensor: Record | None = None
    #: Fqns in each flat parameter, in FSDP1 optimizer order.
    flat_parameters: tuple[tuple[str, ...], ...] = ()
