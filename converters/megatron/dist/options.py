"""Options for reading `megatron-dist`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """Options for MultiLoRA runs. None fits every other run."""

    adapter_slot: str | None = option(
        "MultiLoRA adapter to use: slot, rank and alpha, for example 1:8:16.",
        metavar="SLOT:RANK:ALPHA",
        applies_to="a Megatron-Bridge MultiLoRA run",
        absent="there are no slots with several adapters here",
    )
