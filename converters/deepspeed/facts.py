"""The facts about a source that only DeepSpeed's own writers understand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts:
    """What DeepSpeed's readers tell their writers, in `Checkpoint.facts`."""

    #: Whether modules are in another order than the model's own: partitions are cut from parameters in their order.
    own_module_order: bool = False
