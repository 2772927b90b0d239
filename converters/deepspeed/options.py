"""Options for DeepSpeed's formats."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import MAX_SIZE, option


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Options for experts. None keeps the source's value."""

    ep_size: int | None = option(
        "`ep_size` of all `deepspeed.moe` layers: ranks that share the experts of a layer. [default: as the source]",
        min=1,
        max=MAX_SIZE,
    )


@dataclass(frozen=True, slots=True)
class UniversalOptions:
    """Options for universal checkpoints. False writes a run folder with the step inside and `latest_universal`."""

    step_folder: bool = option(
        "The output is the step's own folder, with zero/ in it, as --output_folder of ds_to_universal.py is: "
        "load_checkpoint takes the folder around it, and its name as the tag.",
        default=False,
    )
