"""Source facts used only by DeepSpeed's writers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts:
    """Facts passed from DeepSpeed's readers to its writers in `Checkpoint.facts`."""

    #: True if modules are not in the model's own order. Partitions follow the parameter order.
    own_module_order: bool = False
