"""Source facts for DeepSpeed's writers, passed in `Checkpoint.facts`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts:
    #: True if modules are not in the model's own order. Partitions follow the parameter order.
    own_module_order: bool = False
