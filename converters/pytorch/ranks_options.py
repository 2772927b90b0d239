"""Options for the FSDP run that will load rank files."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """Options for verl's files. None uses the source's value, or else FSDP2."""

    fsdp_version: int | None = option(
        "1 or 2: FSDP version to load the files (verl: strategy fsdp is 1, fsdp2 is 2). 1 needs a source from FSDP1 "
        "with flat parameters (use_orig_params=False, verl's default). [default: the source's, or 2]",
        min=1,
        max=2,
    )


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options for DTensors. None uses the source's value, or else `cuda`."""

    mesh_device: str | None = option(
        "Device type of the ranks: cuda, npu or cpu. [default: the source's, or cuda]",
        metavar="TYPE",
    )
