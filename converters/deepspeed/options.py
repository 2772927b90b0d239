"""Options for DeepSpeed's formats."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import MAX_SIZE, option


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Options for experts. None keeps the source's value."""

    ep_size: int | None = option(
        "`ep_size` for all `deepspeed.moe` layers: ranks sharing a layer's experts. [default: the source's]",
        min=1,
        max=MAX_SIZE,
    )


@dataclass(frozen=True, slots=True)
class UniversalOptions:
    """Options for universal checkpoints. False writes a run folder with the step inside and `latest_universal`."""

    step_folder: bool = option(
        "Write the step folder itself, with zero/ inside, like ds_to_universal.py --output_folder: "
        "give load_checkpoint its parent folder, and its name as the tag.",
        default=False,
    )
