"""The facts about a source that only Megatron's own writers understand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MegatronFacts:
    """What Megatron's readers tell their writers, in `Checkpoint.facts`."""

    #: Whether modules are in another order than Megatron's own: its optimizers know parameters by their order.
    own_module_order: bool = False
