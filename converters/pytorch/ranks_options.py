"""Options for the FSDP run that will load rank files."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """Options for rank files. None uses the source's value, or else `cuda` and FSDP2."""

    fsdp_version: int | None = option(
        "1 or 2: the FSDP that is to load the files (verl: strategy fsdp is 1, fsdp2 is 2). Without it that of the "
        "source's files, or else 2. For 1 the source has to be files of FSDP1 with flat parameters "
        "(use_orig_params=False, which is verl's default).",
        min=1,
        max=2,
    )
    mesh_device: str | None = option(
        "The type of device that the ranks have: cuda, npu, cpu. Without it that of the source's files, or else cuda.",
        metavar="TYPE",
    )
